#version 450
//! variants LANES=subgroup,shared DTYPE=f32,f16,bf16,q4_0,q4_1,q5_0,q5_1,q8_0,q2_k,q3_k,q4_k,q5_k,q6_k,iq4_nl
//! variants TOKENS=1,8,16 EPILOGUE=plain,gated,rope KV=none,f32,f16
//! only TOKENS=1 or TOKENS=8 or LANES=subgroup
//! only TOKENS=1 or TOKENS=16 or LANES=shared
//! only EPILOGUE=rope or KV=none
//! only EPILOGUE=plain or EPILOGUE=gated or KV=f32 or KV=f16
// y = epilogue(W . norm(x)) for one token (decode) or tiles of TOKENS tokens (prefill).
//
// Lanes lie along rows: each lane owns ROW_TILES rows, one in each of as many tiles, so that no sum crosses lanes and a pair of
// rows that belongs together (a rotary pair, a gate and its up row) meets in one lane. In the shared form SPLIT groups of lanes
// share the columns and add up at the end, which fills a wide device.
//
// The rope epilogue turns q and k, and puts k and v into the cache as kv_write.comp does; y has q only. A lane then holds two rotary
// pairs that are neighbours in their head, so that it owns whole words of a row of halves.
#extension GL_GOOGLE_include_directive : require
#include "lanes.glsl"
#include "activations.glsl"
#ifdef EPILOGUE_ROPE
#include "kv_cache.glsl"
#endif

layout(constant_id = 1) const uint TILE = 32;
layout(constant_id = 2) const uint COLUMNS = 64;
layout(constant_id = 3) const uint HAS_BIAS = 0;
layout(constant_id = 4) const uint EPSILON_BITS = 0;  // float bits of the norm's epsilon
layout(constant_id = 5) const uint HEAD_DIM = 2;      // rope only, like the two below
layout(constant_id = 6) const uint ROTARY_DIM = 2;
layout(constant_id = 7) const uint QUERY_HEADS = 0;   // the heads of q; those of k and as many of v follow
layout(constant_id = 8) const uint X_CHUNK = 64;      // columns staged in shared memory at a time
layout(constant_id = 9) const uint NORM = 0;          // 0 none, 1 RMS, 2 layer norm
layout(constant_id = 10) const uint HAS_NORM_BIAS = 0;
layout(constant_id = 11) const uint ACTIVATION = 0;   // of the sums, or of a pair's first; see activations.glsl
layout(constant_id = 12) const uint EXPERTS_USED = 0; // by a token, of a stack of matrices; 0 where there is no stack
layout(constant_id = 13) const uint EXPERT_X = 0;     // x has a row for each expert of a token, not one for all
layout(constant_id = 14) const uint KEEP_X = 0;       // subgroup form, several tokens: x is read once for all groups
#if defined(EPILOGUE_PLAIN)
layout(constant_id = 15) const uint HAS_RESIDUAL = 0;
#elif defined(EPILOGUE_ROPE)
layout(constant_id = 15) const uint KV_HEADS = 1;
layout(constant_id = 16) const uint OFFSET_ON_DEVICE = 0;
#endif

// What a dispatch does not use is bound to some other buffer.
layout(std430, binding = 0) readonly buffer Weight { uvec4 weight[]; };
layout(std430, binding = 1) readonly buffer X { vec4 x[]; };  // rows are whole vectors: COLUMNS is a multiple of 4
layout(std430, binding = 2) readonly buffer Bias { float bias[]; };
layout(std430, binding = 3) writeonly buffer Y { float y[]; };
layout(std430, binding = 4) readonly buffer NormWeight { vec4 norm_weight[]; };
layout(std430, binding = 5) readonly buffer NormBias { vec4 norm_bias[]; };
#if defined(EPILOGUE_ROPE)
layout(std430, binding = 6) readonly buffer RopeCos { float rope_cos[]; };
layout(std430, binding = 7) readonly buffer RopeSin { float rope_sin[]; };
layout(std430, binding = 8) writeonly buffer CacheK { KV_PAIR cache_k[]; };
layout(std430, binding = 9) writeonly buffer CacheV { KV_PAIR cache_v[]; };
layout(std430, binding = 10) readonly buffer Offset { uint offset[]; };  // cached_len, attended_len
#define NEXT_BINDING 11
#elif defined(EPILOGUE_PLAIN)
layout(std430, binding = 6) readonly buffer Residual { float residual[]; };
#define NEXT_BINDING 7
#else
#define NEXT_BINDING 6
#endif
#if TOKENS > 1 || defined(EPILOGUE_ROPE)
#define COUNTS_TOKENS
layout(std430, binding = NEXT_BINDING) readonly buffer TokenCount { uint token_count[]; };
#else
layout(std430, binding = NEXT_BINDING) readonly buffer Route { uint route[]; };  // see route.comp
#endif

// Where the parts begin that are bound, in units of 16 bytes; then what differs between products that share a pipeline.
layout(push_constant) uniform Push {
    uint weight_first;
    uint x_first;
    uint bias_first;
    uint y_first;
    uint norm_weight_first;
    uint norm_bias_first;
#if defined(EPILOGUE_ROPE)
    uint rope_cos_first;
    uint rope_sin_first;
    uint cache_k_first;
    uint cache_v_first;
    uint offset_first;
#elif defined(EPILOGUE_PLAIN)
    uint residual_first;
#endif
#ifdef COUNTS_TOKENS
    uint token_count_first;
#else
    uint route_first;
#endif
    uint rows;           // (or pairs of rows) that produce output
    uint groups;         // blocks of ROW_TILES tiles that one workgroup works through
    uint outputs;        // values of one token in y
    uint expert_blocks;  // blocks of ROW_TILES tiles of each expert
#ifdef EPILOGUE_ROPE
    uint cache_rows;
    uint cached_len;
#endif
};

uvec4 load_words(uint at) {
    return weight[weight_first + at];
}

#include "weights.glsl"

const uint CHUNKS = (COLUMNS + PACK - 1) / PACK;

float norm_mean[TOKENS];
float norm_scale[TOKENS];
#if TOKENS > 1
uint real_tokens;  // of this tile
#endif

// Columns 4 * word to 4 * word + 3 of the t-th token of this tile, normalized; an RMS norm leaves its factor to the finished sums.
// Padding tokens may hold anything, also denormal numbers, with which processors take a hundred times as long: they count as zeros.
vec4 load_x(uint first_token, uint t, uint word, vec4 norm) {
    if (COLUMNS % PACK != 0 && word >= COLUMNS / 4) return vec4(0.0);
#if TOKENS > 1
    if (t >= real_tokens) return vec4(0.0);
#endif
    vec4 values = x[x_first + (first_token + t) * (COLUMNS / 4) + word];
    if (NORM == 2) values = (values - norm_mean[t]) * norm_scale[t];
    if (NORM != 0) values *= norm;
    if (NORM == 2 && HAS_NORM_BIAS != 0) values += norm_bias[norm_bias_first + word];
    return values;
}

vec4 load_norm(uint word) {
    if (NORM == 0 || (COLUMNS % PACK != 0 && word >= COLUMNS / 4)) return vec4(1.0);
    return norm_weight[norm_weight_first + word];
}

// RMS norm: 1 / sqrt(mean(x^2) + epsilon), applied to the finished sums; Zhang and Sennrich 2019. Layer norm: the mean too, in two
// passes so that a large one costs no accuracy; Ba et al. 2016.
void measure(uint first_token) {
    const uint words = COLUMNS / 4;
    float sums[TOKENS];
    [[unroll]] for (uint t = 0; t < TOKENS; ++t) norm_mean[t] = 0.0;
    if (NORM == 2) {
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) sums[t] = 0.0;
        [[dont_unroll]] for (uint word = LANE; word < words; word += WORKGROUP) {
            [[unroll]] for (uint t = 0; t < TOKENS; ++t) sums[t] += dot(x[x_first + (first_token + t) * words + word], vec4(1.0));
        }
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) norm_mean[t] = lane_sum(sums[t]) / float(COLUMNS);
    }
    [[unroll]] for (uint t = 0; t < TOKENS; ++t) sums[t] = 0.0;
    [[dont_unroll]] for (uint word = LANE; word < words; word += WORKGROUP) {
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
            vec4 distance = x[x_first + (first_token + t) * words + word] - norm_mean[t];
            sums[t] += dot(distance, distance);
        }
    }
    [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
        norm_scale[t] = inversesqrt(lane_sum(sums[t]) / float(COLUMNS) + uintBitsToFloat(EPSILON_BITS));
    }
}

#ifdef EPILOGUE_ROPE

// Two neighbouring values of one head.
void store_pair(uint token, uint head, uint column, vec2 value) {
    if (head < QUERY_HEADS) {
        uint target = 4 * y_first + token * outputs + head * HEAD_DIM + column;
        y[target] = value.x;
        y[target + 1] = value.y;
        return;
    }
    uint row = token + (OFFSET_ON_DEVICE != 0 ? offset[4 * offset_first] : cached_len);
    if (token >= token_count[4 * token_count_first] || row >= cache_rows) return;
    head -= QUERY_HEADS;
    uint target = (head % KV_HEADS * cache_rows + row) * (HEAD_DIM / 2) + column / 2;
    if (head < KV_HEADS) {
        cache_k[2 * KV_UNIT_WORDS * cache_k_first + target] = KV_STORE_PAIR(value);
    } else {
        cache_v[2 * KV_UNIT_WORDS * cache_v_first + target] = KV_STORE_PAIR(value);
    }
}

void store_block(uint first_tile, uint lane, uint first_token, uint first_bias, vec4 sums[TOKENS]) {
    const uint half_dim = HEAD_DIM / 2;
    const uint half_rotary = ROTARY_DIM / 2;
    uint pair = first_tile / 2 * TILE + 2 * lane;
    if (pair >= rows) return;
    uint head = pair / half_dim;
    uint i = pair % half_dim;
    bool rotated = i < half_rotary;
    uint column = rotated ? i : i + half_rotary;
    uint distance = rotated ? half_rotary : half_dim - half_rotary;
    vec4 biases = vec4(0.0);
    if (HAS_BIAS != 0) {
        [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) biases[r] = bias[first_bias + (first_tile + r) * TILE + lane];
    }
    [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
        vec4 held = sums[t] + biases;
        uint token = first_token + t;
        vec2 c = vec2(1.0);
        vec2 s = vec2(0.0);
        if (rotated && head < QUERY_HEADS + KV_HEADS) {
            uint angle = token * half_dim + i;
            c = vec2(rope_cos[4 * rope_cos_first + angle], rope_cos[4 * rope_cos_first + angle + 1]);
            s = vec2(rope_sin[4 * rope_sin_first + angle], rope_sin[4 * rope_sin_first + angle + 1]);
        }
        store_pair(token, head, column, held.xz * c - held.yw * s);
        store_pair(token, head, column + distance, held.yw * c + held.xz * s);
    }
}

#elif defined(EPILOGUE_GATED)

void store_block(uint first_tile, uint lane, uint first_token, uint first_bias, vec4 sums[TOKENS]) {
    [[unroll]] for (uint r = 0; r < ROW_TILES; r += 2) {
        uint pair = (first_tile + r) / 2 * TILE + lane;
        if (pair >= rows) continue;
        vec2 biases = vec2(0.0);
        if (HAS_BIAS != 0) {
            biases.x = bias[first_bias + (first_tile + r) * TILE + lane];
            biases.y = bias[first_bias + (first_tile + r + 1) * TILE + lane];
        }
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
            float value = gated(sums[t][r] + biases.x, sums[t][r + 1] + biases.y, ACTIVATION);
            y[4 * y_first + (first_token + t) * outputs + pair] = value;
        }
    }
}

#else

void store_block(uint first_tile, uint lane, uint first_token, uint first_bias, vec4 sums[TOKENS]) {
    [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) {
        uint row = (first_tile + r) * TILE + lane;
        if (row >= rows) continue;
        float row_bias = 0.0;
        if (HAS_BIAS != 0) row_bias = bias[first_bias + row];
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
            uint at = (first_token + t) * outputs + row;
            float value = activation(sums[t][r] + row_bias, ACTIVATION);
            if (HAS_RESIDUAL != 0) value += residual[4 * residual_first + at];
            y[4 * y_first + at] = value;
        }
    }
}

#endif

#ifdef LANES_SUBGROUP

// A chunk of x is spread over the lanes, four columns each; they are handed round by shuffles with constant indices.
const uint SPREAD = TILE < PACK / 4 ? TILE : PACK / 4;
const uint SPANS = PACK / 4 / SPREAD;
vec4 held_x[TOKENS][SPANS];
#define X_AT(t, l, j) subgroupShuffle(held_x[t][(l) / SPREAD][j], (l) % SPREAD)

#else

const uint SPLIT = WORKGROUP / TILE;
shared vec4 staged[TOKENS * X_CHUNK / 4];
shared vec4 parts[WORKGROUP];
uint staged_at;
#define X_AT(t, l, j) staged[(t) * (X_CHUNK / 4) + staged_at + (l)][j]

#endif

#if TOKENS > 1

// Four columns at a time, so that few weights and the sums of one token are live; 4-bit blocks have them in one word.
void add_chunk(uint block, uint chunk, uint lane, inout vec4 sums[TOKENS]) {
    Chunk held = load_chunk(block, chunk, lane);
    [[unroll]] for (uint c = 0; c < PACK; c += 4) {
        const uint l = c / 8;
        const uint j = c % 8 / 2;
        vec4 weights[4];
        [[unroll]] for (uint k = 0; k < 4; ++k) weights[k] = weight_at(held, l + 4 * (k % 2), j + k / 2);
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
            vec4 sum = sums[t];
            [[unroll]] for (uint k = 0; k < 4; ++k) sum = fma(weights[k], vec4(X_AT(t, l + 4 * (k % 2), j + k / 2)), sum);
            sums[t] = sum;
        }
    }
}

#elif !defined(IN_BLOCKS)

void add_chunk(uint block, uint chunk, uint lane, inout vec4 sums[TOKENS]) {
    [[unroll]] for (uint l = 0; l < PACK / 4; ++l) {
        Part part = load_part(block, chunk, lane, l);
        [[unroll]] for (uint j = 0; j < 4; ++j) sums[0] = fma(part_at(part, j), vec4(X_AT(0, l, j)), sums[0]);
    }
}

#else

// For one token the scales are left to the finished sums of a group: sum(x (a q + b)) = a sum(x q) + b sum(x).
void add_chunk(uint block, uint chunk, uint lane, inout vec4 sums[TOKENS]) {
    Chunk held = load_chunk(block, chunk, lane);
    vec4 dots[PACK / GROUP];
    float totals[PACK / GROUP];
    [[unroll]] for (uint g = 0; g < PACK / GROUP; ++g) {
        dots[g] = vec4(0.0);
        totals[g] = 0.0;
    }
    [[unroll]] for (uint l = 0; l < PACK / 4; ++l) {
        [[unroll]] for (uint j = 0; j < 4; ++j) {
            float value = X_AT(0, l, j);
            totals[GROUP_OF(l)] += value;
            dots[GROUP_OF(l)] = fma(raw_at(held, l, j), vec4(value * raw_scale(l, j)), dots[GROUP_OF(l)]);
        }
    }
    [[unroll]] for (uint g = 0; g < PACK / GROUP; ++g) {
        sums[0] = fma(held.scale[g], dots[g], fma(held.offset[g], vec4(totals[g]), sums[0]));
    }
}

#endif

#ifdef LANES_SUBGROUP

void load_chunk_of_x(uint first_token, uint chunk, uint lane) {
    [[unroll]] for (uint i = 0; i < SPANS; ++i) {
        uint word = chunk * (PACK / 4) + i * SPREAD + lane % SPREAD;
        vec4 norm = load_norm(word);
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) held_x[t][i] = load_x(first_token, t, word, norm);
    }
}

#if TOKENS > 1

// A lane's part of x for all groups. A CPU driver reads an own array in a sixth of the instructions of a storage buffer, if only the
// last index varies: it then makes an array for each token, and all share what the index costs.
vec4 kept_x[TOKENS][SPANS][KEEP_X != 0 ? CHUNKS : 1];

void keep_x(uint first_token, uint lane) {
    [[dont_unroll]] for (uint chunk = 0; chunk < CHUNKS; ++chunk) {
        load_chunk_of_x(first_token, chunk, lane);
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
            [[unroll]] for (uint i = 0; i < SPANS; ++i) kept_x[t][i][chunk] = held_x[t][i];
        }
    }
}

void hold_chunk_of_x(uint first_token, uint chunk, uint lane) {
    if (KEEP_X == 0) {
        load_chunk_of_x(first_token, chunk, lane);
        return;
    }
    [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
        [[unroll]] for (uint i = 0; i < SPANS; ++i) held_x[t][i] = kept_x[t][i][chunk];
    }
}

#else
#define hold_chunk_of_x load_chunk_of_x
#endif

void accumulate(uint block, uint lane, uint first_token, inout vec4 sums[TOKENS]) {
    [[dont_unroll]] for (uint chunk = 0; chunk < CHUNKS; ++chunk) {
        hold_chunk_of_x(first_token, chunk, lane);
        add_chunk(block, chunk, lane, sums);
    }
}

#else

void accumulate(uint block, uint lane, uint first_token, inout vec4 sums[TOKENS]) {
    const uint chunks_per_stage = X_CHUNK / PACK;
    [[dont_unroll]] for (uint base = 0; base < CHUNKS; base += chunks_per_stage) {
        barrier();
        [[dont_unroll]] for (uint i = LANE; i < X_CHUNK / 4; i += WORKGROUP) {
            uint word = base * (PACK / 4) + i;
            vec4 norm = load_norm(word);
            [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
                staged[t * (X_CHUNK / 4) + i] = word < COLUMNS / 4 ? load_x(first_token, t, word, norm) : vec4(0.0);
            }
        }
        barrier();
        uint end = min(base + chunks_per_stage, CHUNKS);
        [[dont_unroll]] for (uint chunk = base + LANE / TILE; chunk < end; chunk += SPLIT) {
            staged_at = (chunk - base) * (PACK / 4);
            add_chunk(block, chunk, lane, sums);
        }
    }
    if (SPLIT > 1) {
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
            barrier();
            parts[LANE] = sums[t];
            barrier();
            sums[t] = vec4(0.0);
            [[dont_unroll]] for (uint part = 0; part < SPLIT; ++part) sums[t] += parts[part * TILE + lane];
        }
    }
}

#endif

void main() {
    const uint lane = LANE % TILE;
#if TOKENS == 1
    const uint first_token = gl_WorkGroupID.y;
#else
    const uint first_token = spread(gl_WorkGroupID.y, gl_NumWorkGroups.y) * TOKENS;
    if (first_token >= token_count[4 * token_count_first]) return;
    real_tokens = token_count[4 * token_count_first] - first_token;
#endif
    uint first_x = first_token;
    uint first_block = 0;
#ifndef COUNTS_TOKENS
    // Each expert of a token takes a row of workgroups, as if it were a token.
    if (EXPERTS_USED != 0) {
        uint token = first_token / EXPERTS_USED;
        uint expert = route[4 * route_first + token * EXPERTS_USED + first_token];
        if (expert == 0xFFFFFFFFu) return;
        if (EXPERT_X == 0) first_x = token;
        first_block = expert * expert_blocks;
    }
#endif
    if (NORM != 0) measure(first_x);
#if defined(LANES_SUBGROUP) && TOKENS > 1
    if (KEEP_X != 0) keep_x(first_x, lane);
#endif
#ifndef EPILOGUE_PLAIN
    const uint tiles = (rows + TILE - 1) / TILE * 2;
#else
    const uint tiles = (rows + TILE - 1) / TILE;
#endif
    [[dont_unroll]] for (uint group = 0; group < groups; ++group) {
        uint block = gl_WorkGroupID.x * groups + group;
        if (block * ROW_TILES >= tiles) break;
        vec4 sums[TOKENS];
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) sums[t] = vec4(0.0);
        accumulate(first_block + block, lane, first_x, sums);
        if (NORM == 1) {
            [[unroll]] for (uint t = 0; t < TOKENS; ++t) sums[t] *= norm_scale[t];
        }
#ifdef LANES_SHARED
        if (LANE < TILE)
#endif
        store_block(block * ROW_TILES, lane, first_token, 4 * bias_first + first_block * ROW_TILES * TILE, sums);
    }
}
