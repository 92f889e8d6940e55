// A weight as the kernels read it. A row is cut into blocks of BLOCK columns and WORDS words; rows lie in blocks of ROW_TILES tiles of
// TILE. Word w of a row stands next to the same word of the rows in the other tiles, and those next to the same of the tile's other
// rows: row ((block * ROW_TILES + r) * TILE + lane) has it in component r of uvec4 number (block * row_words + w) * TILE + lane.
// Columns and rows are padded with zeros.
//
// Kernels work through rows in chunks of PACK = 32 columns. load_chunk reads a lane's rows, one of each tile; weight_at(chunk, l, j) is
// their column 4 l + j, l being a constant. The includer declares TILE, COLUMNS and uvec4 load_words(uint at).
#ifndef WEIGHTS_GLSL
#define WEIGHTS_GLSL

#include "halves.glsl"

#define ROW_TILES 4
#define PACK 32

#if defined(DTYPE_F32) || defined(DTYPE_F16) || defined(DTYPE_BF16)

#ifdef DTYPE_F32
#define WORDS 32
#else
#define WORDS 16
#endif

// Columns 4 l to 4 l + 3. With one token a kernel asks for part after part, so that few words are live at a time.
struct Part {
    uvec4 words[WORDS * 4 / PACK];
};

struct Chunk {
    Part parts[PACK / 4];
};

Part load_part(uint block, uint chunk, uint lane, uint l) {
    uint at = (block * ((COLUMNS + PACK - 1) / PACK) + chunk) * WORDS + l * (WORDS * 4 / PACK);
    Part part;
    [[unroll]] for (uint w = 0; w < WORDS * 4 / PACK; ++w) part.words[w] = load_words((at + w) * TILE + lane);
    return part;
}

vec4 part_at(Part part, uint j) {
#ifdef DTYPE_F32
    uvec4 a = j % 2 == 0 ? part.words[0] : part.words[1];
    uvec4 b = j % 2 == 0 ? part.words[2] : part.words[3];
    return uintBitsToFloat(j < 2 ? a : b);
#else
    uvec4 words = j < 2 ? part.words[0] : part.words[1];
#ifdef DTYPE_F16
    return unpack_f16(words >> 16 * (j % 2));
#else
    return unpack_bf16(words >> 16 * (j % 2));
#endif
#endif
}

Chunk load_chunk(uint block, uint chunk, uint lane) {
    Chunk held;
    [[unroll]] for (uint l = 0; l < PACK / 4; ++l) held.parts[l] = load_part(block, chunk, lane, l);
    return held;
}

vec4 weight_at(Chunk held, uint l, uint j) {
    return part_at(held.parts[l], j);
}

#else
#define IN_BLOCKS
#include "blocks.glsl"
#endif

#endif
