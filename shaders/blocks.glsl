// The GGUF block formats, as `weights.glsl` lays them out and `weights/block_layout.py` packs them.
//
// A chunk is 32 columns, a block PARTS chunks. After SCALE_WORDS words for the whole block the integers q of each chunk stand in a plane
// of their LOW_BITS low bits, as many words, and then in one of their HIGH_BITS high bits. A group of GROUP columns has a scale and an
// offset, and a weight is scale * q + offset. Formats after ggml's definitions (ggml-common.h), as the gguf package decodes them.
#ifndef BLOCKS_GLSL
#define BLOCKS_GLSL

#if defined(DTYPE_Q4_0) || defined(DTYPE_IQ4_NL)
#define PARTS 2
#define SCALE_WORDS 1
#define LOW_BITS 4
#elif defined(DTYPE_Q4_1)
#define PARTS 1
#define SCALE_WORDS 1
#define LOW_BITS 4
#elif defined(DTYPE_Q5_0)
#define PARTS 2
#define SCALE_WORDS 1
#define LOW_BITS 4
#define HIGH_BITS 1
#elif defined(DTYPE_Q5_1)
#define PARTS 1
#define SCALE_WORDS 1
#define LOW_BITS 4
#define HIGH_BITS 1
#elif defined(DTYPE_Q8_0)
#define PARTS 2
#define SCALE_WORDS 1
#define LOW_BITS 8
#elif defined(DTYPE_Q2_K)
#define PARTS 8
#define SCALE_WORDS 5
#define LOW_BITS 2
#define GROUP 16
#elif defined(DTYPE_Q3_K)
#define PARTS 8
#define SCALE_WORDS 4
#define LOW_BITS 2
#define HIGH_BITS 1
#define GROUP 16
#elif defined(DTYPE_Q4_K)
#define PARTS 8
#define SCALE_WORDS 5
#define LOW_BITS 4
#elif defined(DTYPE_Q5_K)
#define PARTS 8
#define SCALE_WORDS 5
#define LOW_BITS 4
#define HIGH_BITS 1
#elif defined(DTYPE_Q6_K)
#define PARTS 8
#define SCALE_WORDS 5
#define LOW_BITS 4
#define HIGH_BITS 2
#define GROUP 16
#endif

#ifndef GROUP
#define GROUP 32
#endif
#define BLOCK (PARTS * PACK)
#ifdef HIGH_BITS
#define WORDS (SCALE_WORDS + PARTS * (LOW_BITS + HIGH_BITS))
#else
#define WORDS (SCALE_WORDS + PARTS * LOW_BITS)
#endif

struct Chunk {
    uvec4 low[LOW_BITS];
#ifdef HIGH_BITS
    uvec4 high[HIGH_BITS];
#endif
    vec4 scale[PACK / GROUP];
    vec4 offset[PACK / GROUP];
};

#define FIELD(words, at, bits) ((words) >> (at) & ((1u << (bits)) - 1u))

// Scale and offset of each group, from the block's first word and, in K-quants, the word (two of Q3_K) with the chunk's scales.
void set_affine(uvec4 first, uvec4 scales, uvec4 more, uint part, inout Chunk held) {
#if defined(DTYPE_Q4_1) || defined(DTYPE_Q5_1)
    held.scale[0] = unpack_f16(first);
    held.offset[0] = unpack_f16(first >> 16);
#elif SCALE_WORDS == 1
    held.scale[0] = unpack_f16(first >> 16 * part);
#if defined(DTYPE_Q4_0)
    held.offset[0] = -8.0 * held.scale[0];
#elif defined(DTYPE_Q5_0)
    held.offset[0] = -16.0 * held.scale[0];
#else
    held.offset[0] = vec4(0.0);
#endif
#elif defined(DTYPE_Q2_K)
    scales >>= 16 * (part % 2);
    [[unroll]] for (uint g = 0; g < 2; ++g) {
        held.scale[g] = unpack_f16(first) * vec4(FIELD(scales, 8 * g, 4));
        held.offset[g] = -unpack_f16(first >> 16) * vec4(FIELD(scales, 8 * g + 4, 4));
    }
#elif defined(DTYPE_Q3_K)
    [[unroll]] for (uint g = 0; g < 2; ++g) {
        uvec4 scale = FIELD(scales, 8 * (part % 4) + 4 * g, 4) | FIELD(more, 4 * part + 2 * g, 2) << 4;
        held.scale[g] = unpack_f16(first) * (vec4(scale) - float(1 << 5));
        held.offset[g] = -4.0 * held.scale[g];
    }
#elif defined(DTYPE_Q4_K) || defined(DTYPE_Q5_K)
    scales >>= 16 * (part % 2);
    held.scale[0] = unpack_f16(first) * vec4(FIELD(scales, 0, 8));
    held.offset[0] = -unpack_f16(first >> 16) * vec4(FIELD(scales, 8, 8));
#elif defined(DTYPE_Q6_K)
    scales <<= 16 * (1 - part % 2);
    held.scale[0] = unpack_f16(first) * vec4(ivec4(scales << 8) >> 24);
    held.scale[1] = unpack_f16(first) * vec4(ivec4(scales) >> 24);
    [[unroll]] for (uint g = 0; g < 2; ++g) held.offset[g] = -float(1 << 5) * held.scale[g];
#endif
}

Chunk load_chunk(uint block, uint chunk, uint lane) {
    uint part = chunk % PARTS;
    uint at = (block * ((COLUMNS + BLOCK - 1) / BLOCK) + chunk / PARTS) * WORDS * TILE + lane;
    Chunk held;
    uvec4 first = load_words(at);
    uvec4 scales = uvec4(0);
    uvec4 more = uvec4(0);
#if defined(DTYPE_Q3_K)
    scales = load_words(at + (1 + part / 4) * TILE);
    more = load_words(at + 3 * TILE);
#elif SCALE_WORDS > 1
    scales = load_words(at + (1 + part / 2) * TILE);
#endif
    at += SCALE_WORDS * TILE;
    [[unroll]] for (uint w = 0; w < LOW_BITS; ++w) held.low[w] = load_words(at + (part * LOW_BITS + w) * TILE);
#ifdef HIGH_BITS
    at += PARTS * LOW_BITS * TILE;
    [[unroll]] for (uint w = 0; w < HIGH_BITS; ++w) held.high[w] = load_words(at + (part * HIGH_BITS + w) * TILE);
#endif
    set_affine(first, scales, more, part, held);
    return held;
}

// Planes of 2, 4 and 8 bits keep the files' order: column c is in field c / (4 * bits) of byte c % (4 * bits).
#define PLANE_WORD(l, bits) ((l) % (bits))
#define PLANE_FIELD(l, bits) ((bits) * ((l) / (bits)))
#define GROUP_OF(l) (4 * (l) / GROUP)

// The integers of column 4 l + j; exact.
vec4 quant_at(Chunk held, uint l, uint j) {
    uvec4 low = held.low[PLANE_WORD(l, LOW_BITS)];
#if LOW_BITS == 8
    return vec4(ivec4(low << (24 - 8 * j)) >> 24);
#else
    uvec4 q = FIELD(low >> 8 * j, PLANE_FIELD(l, LOW_BITS), LOW_BITS);
#ifdef HIGH_BITS
#if HIGH_BITS == 1
    q |= FIELD(held.high[0] >> j, 4 * l, 1) << LOW_BITS;
#else
    q |= FIELD(held.high[PLANE_WORD(l, 2)] >> 8 * j, PLANE_FIELD(l, 2), 2) << LOW_BITS;
#endif
#endif
#ifdef DTYPE_IQ4_NL
    // Sixteen signed bytes: -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
    // `mix` selects; `?:` would branch for each weight, and some drivers need gigabytes for as many branches.
    uvec4 negative = mix(uvec4(0xbfad9881u), uvec4(0xf6eaddcfu), greaterThanEqual(q, uvec4(4)));
    uvec4 positive = mix(uvec4(0x26190d01u), uvec4(0x71594535u), greaterThanEqual(q, uvec4(12)));
    uvec4 table = mix(negative, positive, greaterThanEqual(q, uvec4(8)));
    return vec4(ivec4(table << (24 - 8 * (q & 3))) >> 24);
#else
    return vec4(ivec4(q));
#endif
#endif
}

vec4 weight_at(Chunk held, uint l, uint j) {
    return fma(quant_at(held, l, j), held.scale[GROUP_OF(l)], held.offset[GROUP_OF(l)]);
}

// For products with one token: the same integers where they stand in their words, which saves a shift; raw_at times raw_scale is
// quant_at. j is a constant here.
#if LOW_BITS == 4 && !defined(HIGH_BITS) && !defined(DTYPE_IQ4_NL)
#define RAW_SHIFT(l, j) (8 * (j) + PLANE_FIELD(l, 4))

float raw_scale(uint l, uint j) {
    return uintBitsToFloat((127 - min(RAW_SHIFT(l, j), 24)) << 23);
}

vec4 raw_at(Chunk held, uint l, uint j) {
    uvec4 low = held.low[PLANE_WORD(l, 4)];
    if (RAW_SHIFT(l, j) == 28) return vec4(ivec4(low >> 4 & 0x0f000000u));  // stays clear of the sign
    return vec4(ivec4(low & ((1u << LOW_BITS) - 1u) << RAW_SHIFT(l, j)));
}
#else
float raw_scale(uint l, uint j) {
    return 1.0;
}

vec4 raw_at(Chunk held, uint l, uint j) {
    return quant_at(held, l, j);
}
#endif

#endif
