#version 450
//! variants LANES=subgroup,shared DTYPE=f32,f16,bf16,q4_0,q4_1,q5_0,q5_1,q8_0,q2_k,q3_k,q4_k,q5_k,q6_k,iq4_nl
//! variants TOKENS=1,8 EPILOGUE=plain,rope,gated
// y = epilogue(W . norm(x)) for one token (decode) or tiles of TOKENS tokens (prefill).
//
// Lanes lie along rows: each lane owns ROW_TILES rows, one in each of as many tiles, so that no sum crosses lanes and a pair of
// rows that belongs together (a rotary pair, a gate and its up row) meets in one lane. In the shared form SPLIT groups of lanes
// share the columns and add up at the end, which fills a wide device.
#extension GL_GOOGLE_include_directive : require
#include "lanes.glsl"
#include "activations.glsl"

layout(constant_id = 1) const uint TILE = 32;
layout(constant_id = 2) const uint COLUMNS = 64;
layout(constant_id = 3) const uint ROWS = 64;         // rows (or pairs of rows) that produce output
layout(constant_id = 4) const uint GROUPS = 1;        // blocks of ROW_TILES tiles that one workgroup works through
layout(constant_id = 5) const uint OUTPUTS = 64;      // values of one token in y
layout(constant_id = 6) const uint HAS_BIAS = 0;
layout(constant_id = 7) const uint EPSILON_BITS = 0;  // float bits of the norm's epsilon
layout(constant_id = 8) const uint HEAD_DIM = 2;      // rope only, like the two below
layout(constant_id = 9) const uint ROTARY_DIM = 2;
layout(constant_id = 10) const uint ROTARY_HEADS = 0; // q and k heads; the heads after them are v and pass unrotated
layout(constant_id = 11) const uint X_CHUNK = 64;     // columns staged in shared memory at a time
layout(constant_id = 12) const uint NORM = 0;         // 0 none, 1 RMS, 2 layer norm
layout(constant_id = 13) const uint HAS_NORM_BIAS = 0;
layout(constant_id = 14) const uint ACTIVATION = 0;   // of the sums, or of a pair's first; see activations.glsl
#ifdef EPILOGUE_PLAIN
layout(constant_id = 15) const uint HAS_RESIDUAL = 0;
#endif

// What a dispatch does not use is bound to some other buffer.
layout(std430, binding = 0) readonly buffer Weight { uvec4 weight[]; };
layout(std430, binding = 1) readonly buffer X { float x[]; };
layout(std430, binding = 1) readonly buffer X4 { vec4 x4[]; };  // the same, where rows are whole vectors
layout(std430, binding = 2) readonly buffer Bias { float bias[]; };
layout(std430, binding = 3) writeonly buffer Y { float y[]; };
layout(std430, binding = 4) readonly buffer NormWeight { float norm_weight[]; };
layout(std430, binding = 4) readonly buffer NormWeight4 { vec4 norm_weight4[]; };
layout(std430, binding = 5) readonly buffer NormBias { float norm_bias[]; };
#if defined(EPILOGUE_ROPE)
layout(std430, binding = 6) readonly buffer RopeCos { float rope_cos[]; };
layout(std430, binding = 7) readonly buffer RopeSin { float rope_sin[]; };
#define NEXT_BINDING 8
#elif defined(EPILOGUE_PLAIN)
layout(std430, binding = 6) readonly buffer Residual { float residual[]; };
#define NEXT_BINDING 7
#else
#define NEXT_BINDING 6
#endif
#if TOKENS > 1
layout(std430, binding = NEXT_BINDING) readonly buffer TokenCount { uint token_count[]; };
#endif

uvec4 load_words(uint at) {
    return weight[at];
}

#include "weights.glsl"

const uint CHUNKS = (COLUMNS + PACK - 1) / PACK;

float norm_mean[TOKENS];
float norm_scale[TOKENS];

// A column of x of the t-th token of this tile, normalized; an RMS norm leaves its factor to the finished sums.
float load_x(uint first_token, uint t, uint column) {
    if (COLUMNS % PACK != 0 && column >= COLUMNS) return 0.0;
    float value = x[(first_token + t) * COLUMNS + column];
    if (NORM == 2) value = (value - norm_mean[t]) * norm_scale[t];
    if (NORM != 0) value *= norm_weight[column];
    if (NORM == 2 && HAS_NORM_BIAS != 0) value += norm_bias[column];
    return value;
}

// Four columns from a multiple of four on.
vec4 load_x4(uint first_token, uint t, uint column) {
    if (COLUMNS % 4 != 0 || NORM == 2) {
        vec4 values;
        [[unroll]] for (uint i = 0; i < 4; ++i) values[i] = load_x(first_token, t, column + i);
        return values;
    }
    if (COLUMNS % PACK != 0 && column >= COLUMNS) return vec4(0.0);
    vec4 values = x4[((first_token + t) * COLUMNS + column) / 4];
    return NORM == 0 ? values : values * norm_weight4[column / 4];
}

// RMS norm: 1 / sqrt(mean(x^2) + epsilon), applied to the finished sums; Zhang and Sennrich 2019. Layer norm: the mean too, in two
// passes so that a large one costs no accuracy; Ba et al. 2016.
void measure(uint first_token, uint t) {
    uint start = (first_token + t) * COLUMNS;
    float mean = 0.0;
    if (NORM == 2) {
        float sum = 0.0;
        [[dont_unroll]] for (uint column = LANE; column < COLUMNS; column += WORKGROUP) sum += x[start + column];
        mean = lane_sum(sum) / float(COLUMNS);
    }
    float squares = 0.0;
    [[dont_unroll]] for (uint column = LANE; column < COLUMNS; column += WORKGROUP) {
        float distance = x[start + column] - mean;
        squares = fma(distance, distance, squares);
    }
    norm_mean[t] = mean;
    norm_scale[t] = inversesqrt(lane_sum(squares) / float(COLUMNS) + uintBitsToFloat(EPSILON_BITS));
}

void store_block(uint first_tile, uint lane, uint first_token, float sums[ROW_TILES][TOKENS]) {
#if defined(EPILOGUE_ROPE) || defined(EPILOGUE_GATED)
    [[unroll]] for (uint r = 0; r < ROW_TILES; r += 2) {
        uint pair = (first_tile + r) / 2 * TILE + lane;
        if (pair >= ROWS) continue;
        float bias_a = 0.0;
        float bias_b = 0.0;
        if (HAS_BIAS != 0) {
            bias_a = bias[(first_tile + r) * TILE + lane];
            bias_b = bias[(first_tile + r + 1) * TILE + lane];
        }
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
            float a = sums[r][t] + bias_a;
            float b = sums[r + 1][t] + bias_b;
            uint token = first_token + t;
#ifdef EPILOGUE_GATED
            y[token * OUTPUTS + pair] = activation(a, ACTIVATION) * b;
#else
            const uint half_dim = HEAD_DIM / 2;
            uint head = pair / half_dim;
            uint i = pair % half_dim;
            bool rotated = i < ROTARY_DIM / 2;
            uint column = head * HEAD_DIM + (rotated ? i : i + ROTARY_DIM / 2);
            uint distance = rotated ? ROTARY_DIM / 2 : half_dim - ROTARY_DIM / 2;
            float c = 1.0;
            float s = 0.0;
            if (head < ROTARY_HEADS) {
                c = rope_cos[token * half_dim + i];
                s = rope_sin[token * half_dim + i];
            }
            y[token * OUTPUTS + column] = a * c - b * s;
            y[token * OUTPUTS + column + distance] = b * c + a * s;
#endif
        }
    }
#else
    [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) {
        uint row = (first_tile + r) * TILE + lane;
        if (row >= ROWS) continue;
        float row_bias = 0.0;
        if (HAS_BIAS != 0) row_bias = bias[row];
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
            float value = activation(sums[r][t] + row_bias, ACTIVATION);
            if (HAS_RESIDUAL != 0) value += residual[(first_token + t) * OUTPUTS + row];
            y[(first_token + t) * OUTPUTS + row] = value;
        }
    }
#endif
}

#ifdef LANES_SUBGROUP

// A chunk of x is spread over the lanes, four columns each; they are handed round by shuffles with constant indices.
const uint SPREAD = TILE < PACK / 4 ? TILE : PACK / 4;
vec4 held_x[TOKENS][PACK / 4 / SPREAD];
#define X_AT(t, l, j) subgroupShuffle(held_x[t][(l) / SPREAD][j], (l) % SPREAD)

#else

const uint SPLIT = WORKGROUP / TILE;
shared float staged[TOKENS * X_CHUNK];
uint staged_at;
#define X_AT(t, l, j) staged[(t) * X_CHUNK + staged_at + 4 * (l) + (j)]

#endif

#if TOKENS > 1

void add_chunk(uint block, uint chunk, uint lane, inout float sums[ROW_TILES][TOKENS]) {
    Chunk held = load_chunk(block, chunk, lane);
    [[dont_unroll]] for (uint j = 0; j < 4; ++j) {
        [[unroll]] for (uint l = 0; l < PACK / 4; ++l) {
            float w[ROW_TILES];
            [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) w[r] = weight_at(held, r, l, j);
            [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
                float value = X_AT(t, l, j);
                [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) sums[r][t] = fma(w[r], value, sums[r][t]);
            }
        }
    }
}

#elif !defined(IN_BLOCKS)

void add_chunk(uint block, uint chunk, uint lane, inout float sums[ROW_TILES][TOKENS]) {
    [[unroll]] for (uint l = 0; l < PACK / 4; ++l) {
        Part part = load_part(block, chunk, lane, l);
        [[unroll]] for (uint j = 0; j < 4; ++j) {
            float value = X_AT(0, l, j);
            [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) sums[r][0] = fma(part_at(part, r, j), value, sums[r][0]);
        }
    }
}

#else

// For one token the scales are left to the finished sums of a group: sum(x (a q + b)) = a sum(x q) + b sum(x).
void add_chunk(uint block, uint chunk, uint lane, inout float sums[ROW_TILES][TOKENS]) {
    Chunk held = load_chunk(block, chunk, lane);
    float dots[ROW_TILES][PACK / GROUP];
    float totals[PACK / GROUP];
    [[unroll]] for (uint g = 0; g < PACK / GROUP; ++g) {
        totals[g] = 0.0;
        [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) dots[r][g] = 0.0;
    }
    [[unroll]] for (uint l = 0; l < PACK / 4; ++l) {
        [[unroll]] for (uint j = 0; j < 4; ++j) {
            float value = X_AT(0, l, j);
            totals[GROUP_OF(l)] += value;
            value *= raw_scale(l, j);
            [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) {
                dots[r][GROUP_OF(l)] = fma(raw_at(held, r, l, j), value, dots[r][GROUP_OF(l)]);
            }
        }
    }
    [[unroll]] for (uint g = 0; g < PACK / GROUP; ++g) {
        [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) {
            sums[r][0] = fma(held.affine[r][g].x, dots[r][g], fma(held.affine[r][g].y, totals[g], sums[r][0]));
        }
    }
}

#endif

#ifdef LANES_SUBGROUP

void accumulate(uint block, uint lane, uint first_token, inout float sums[ROW_TILES][TOKENS]) {
    [[dont_unroll]] for (uint chunk = 0; chunk < CHUNKS; ++chunk) {
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
            [[unroll]] for (uint i = 0; i < PACK / 4 / SPREAD; ++i) {
                held_x[t][i] = load_x4(first_token, t, chunk * PACK + 4 * (i * SPREAD + lane % SPREAD));
            }
        }
        add_chunk(block, chunk, lane, sums);
    }
}

#else

void accumulate(uint block, uint lane, uint first_token, inout float sums[ROW_TILES][TOKENS]) {
    const uint chunks_per_stage = X_CHUNK / PACK;
    [[dont_unroll]] for (uint base = 0; base < CHUNKS; base += chunks_per_stage) {
        barrier();
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
            [[dont_unroll]] for (uint i = LANE; i < X_CHUNK; i += WORKGROUP) {
                uint column = base * PACK + i;
                staged[t * X_CHUNK + i] = column < COLUMNS ? load_x(first_token, t, column) : 0.0;
            }
        }
        barrier();
        uint end = min(base + chunks_per_stage, CHUNKS);
        [[dont_unroll]] for (uint chunk = base + LANE / TILE; chunk < end; chunk += SPLIT) {
            staged_at = (chunk - base) * PACK;
            add_chunk(block, chunk, lane, sums);
        }
    }
    if (SPLIT > 1) {
        [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) {
            [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
                barrier();
                lane_scratch[LANE] = sums[r][t];
                barrier();
                float total = 0.0;
                [[dont_unroll]] for (uint part = 0; part < SPLIT; ++part) total += lane_scratch[part * TILE + lane];
                sums[r][t] = total;
            }
        }
    }
}

#endif

void main() {
    const uint lane = LANE % TILE;
    const uint first_token = gl_WorkGroupID.y * TOKENS;
#if TOKENS > 1
    if (first_token >= token_count[0]) return;
#endif
    if (NORM != 0) {
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) measure(first_token, t);
    }
#if defined(EPILOGUE_ROPE) || defined(EPILOGUE_GATED)
    const uint tiles = (ROWS + TILE - 1) / TILE * 2;
#else
    const uint tiles = (ROWS + TILE - 1) / TILE;
#endif
    [[dont_unroll]] for (uint group = 0; group < GROUPS; ++group) {
        uint block = gl_WorkGroupID.x * GROUPS + group;
        if (block * ROW_TILES >= tiles) break;
        float sums[ROW_TILES][TOKENS];
        [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) {
            [[unroll]] for (uint t = 0; t < TOKENS; ++t) sums[r][t] = 0.0;
        }
        accumulate(block, lane, first_token, sums);
        if (NORM == 1) {
            [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) {
                [[unroll]] for (uint t = 0; t < TOKENS; ++t) sums[r][t] *= norm_scale[t];
            }
        }
#ifdef LANES_SHARED
        if (LANE < TILE)
#endif
        store_block(block * ROW_TILES, lane, first_token, sums);
    }
}
