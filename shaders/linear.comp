#version 450
//! variants LANES=subgroup,shared DTYPE=f32,f16,bf16 TOKENS=1,8 NORM=none,rms,layer EPILOGUE=none,add,rope,gated,gelu_tanh
// y = epilogue(W . norm(x)) for one token (decode) or tiles of TOKENS tokens (prefill).
//
// Lanes lie along rows: each lane owns ROW_TILES rows, one in each of as many tiles, so that no sum crosses lanes and a pair of
// rows that belongs together (a rotary pair, a gate and its up row) meets in one lane. In the shared form SPLIT groups of lanes
// share the columns and add up at the end, which fills a wide device.
#extension GL_GOOGLE_include_directive : require
#include "lanes.glsl"
#include "weights.glsl"
#include "activations.glsl"

#ifdef LANES_SUBGROUP
#define ROW_TILES 4
#else
#define ROW_TILES 2
#endif

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
#ifdef NORM_LAYER
layout(constant_id = 12) const uint HAS_NORM_BIAS = 0;
#endif

layout(std430, binding = 0) readonly buffer Weight { uvec4 weight[]; };
layout(std430, binding = 1) readonly buffer X { float x[]; };
layout(std430, binding = 2) readonly buffer Bias { float bias[]; };
layout(std430, binding = 3) writeonly buffer Y { float y[]; };
#if defined(NORM_LAYER)
layout(std430, binding = 4) readonly buffer NormWeight { float norm_weight[]; };
layout(std430, binding = 5) readonly buffer NormBias { float norm_bias[]; };
#define NEXT_BINDING 6
#elif defined(NORM_RMS)
layout(std430, binding = 4) readonly buffer NormWeight { float norm_weight[]; };
#define NEXT_BINDING 5
#else
#define NEXT_BINDING 4
#endif
#ifdef EPILOGUE_ADD
layout(std430, binding = NEXT_BINDING) readonly buffer Residual { float residual[]; };
#endif
#ifdef EPILOGUE_ROPE
layout(std430, binding = NEXT_BINDING) readonly buffer RopeCos { float rope_cos[]; };
layout(std430, binding = NEXT_BINDING + 1) readonly buffer RopeSin { float rope_sin[]; };
#endif
#if TOKENS > 1
#if defined(EPILOGUE_ROPE)
layout(std430, binding = NEXT_BINDING + 2) readonly buffer TokenCount { uint token_count[]; };
#elif defined(EPILOGUE_ADD)
layout(std430, binding = NEXT_BINDING + 1) readonly buffer TokenCount { uint token_count[]; };
#else
layout(std430, binding = NEXT_BINDING) readonly buffer TokenCount { uint token_count[]; };
#endif
#endif

const uint CHUNKS = (COLUMNS + PACK - 1) / PACK;

#ifdef NORM_LAYER
float norm_mean[TOKENS];
float norm_scale[TOKENS];
#endif

// x of the t-th token of this tile, normalized; RMS norm leaves its factor to the finished sums.
float load_x(uint first_token, uint t, uint column) {
    float value = 0.0;
    if (COLUMNS % PACK == 0 || column < COLUMNS) {
        value = x[(first_token + t) * COLUMNS + column];
#ifdef NORM_RMS
        value *= norm_weight[column];
#endif
#ifdef NORM_LAYER
        value = (value - norm_mean[t]) * norm_scale[t] * norm_weight[column];
        if (HAS_NORM_BIAS != 0) value += norm_bias[column];
#endif
    }
    return value;
}

#ifdef NORM_LAYER
// Mean and 1 / sqrt(variance + epsilon) of a token, in two passes so that a large mean costs no accuracy; Ba et al. 2016.
void measure(uint first_token, uint t) {
    uint start = (first_token + t) * COLUMNS;
    float sum = 0.0;
    [[dont_unroll]] for (uint column = LANE; column < COLUMNS; column += WORKGROUP) sum += x[start + column];
    float mean = lane_sum(sum) / float(COLUMNS);
    float squares = 0.0;
    [[dont_unroll]] for (uint column = LANE; column < COLUMNS; column += WORKGROUP) {
        float distance = x[start + column] - mean;
        squares = fma(distance, distance, squares);
    }
    norm_mean[t] = mean;
    norm_scale[t] = inversesqrt(lane_sum(squares) / float(COLUMNS) + uintBitsToFloat(EPSILON_BITS));
}
#endif

#ifdef NORM_RMS
// 1 / sqrt(mean(x^2) + epsilon), applied to the finished sums; Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
float inverse_rms(uint token) {
    float sum = 0.0;
    [[dont_unroll]] for (uint column = LANE; column < COLUMNS; column += WORKGROUP) {
        float value = x[token * COLUMNS + column];
        sum = fma(value, value, sum);
    }
    return inversesqrt(lane_sum(sum) / float(COLUMNS) + uintBitsToFloat(EPSILON_BITS));
}
#endif

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
            y[token * OUTPUTS + pair] = silu(a) * b;
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
            float value = sums[r][t] + row_bias;
#ifdef EPILOGUE_ADD
            value += residual[(first_token + t) * OUTPUTS + row];
#endif
#ifdef EPILOGUE_GELU_TANH
            value = gelu_tanh(value);
#endif
            y[(first_token + t) * OUTPUTS + row] = value;
        }
    }
#endif
}

#ifdef LANES_SUBGROUP

// One chunk's columns of x are spread over the lanes; each is handed round by a shuffle with a constant index.
const uint SPREAD = TILE < PACK ? TILE : PACK;
const uint X_REGISTERS = PACK / SPREAD;

void accumulate(uint first_tile, uint lane, uint first_token, inout float sums[ROW_TILES][TOKENS]) {
    [[dont_unroll]] for (uint chunk = 0; chunk < CHUNKS; ++chunk) {
        float held[TOKENS][X_REGISTERS];
        [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
            [[unroll]] for (uint j = 0; j < X_REGISTERS; ++j) {
                held[t][j] = load_x(first_token, t, chunk * PACK + j * SPREAD + lane % SPREAD);
            }
        }
        uvec4 packed[ROW_TILES];
        [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) {
            packed[r] = weight[((first_tile + r) * CHUNKS + chunk) * TILE + lane];
        }
        [[unroll]] for (uint pair = 0; pair < PACK / 2; ++pair) {
            vec2 w[ROW_TILES];
            [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) w[r] = unpack_pair(packed[r], pair);
            [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
                float x0 = subgroupShuffle(held[t][2 * pair / SPREAD], 2 * pair % SPREAD);
                float x1 = subgroupShuffle(held[t][(2 * pair + 1) / SPREAD], (2 * pair + 1) % SPREAD);
                [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) {
                    sums[r][t] = fma(w[r].y, x1, fma(w[r].x, x0, sums[r][t]));
                }
            }
        }
    }
}

#else

const uint SPLIT = WORKGROUP / TILE;
shared float staged[TOKENS * X_CHUNK];

void accumulate(uint first_tile, uint lane, uint first_token, inout float sums[ROW_TILES][TOKENS]) {
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
            uvec4 packed[ROW_TILES];
            [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) {
                packed[r] = weight[((first_tile + r) * CHUNKS + chunk) * TILE + lane];
            }
            [[unroll]] for (uint pair = 0; pair < PACK / 2; ++pair) {
                [[unroll]] for (uint t = 0; t < TOKENS; ++t) {
                    uint at = t * X_CHUNK + (chunk - base) * PACK + 2 * pair;
                    float x0 = staged[at];
                    float x1 = staged[at + 1];
                    [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) {
                        vec2 w = unpack_pair(packed[r], pair);
                        sums[r][t] = fma(w.y, x1, fma(w.x, x0, sums[r][t]));
                    }
                }
            }
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
#ifdef NORM_RMS
    float scale[TOKENS];
    [[unroll]] for (uint t = 0; t < TOKENS; ++t) scale[t] = inverse_rms(first_token + t);
#endif
#ifdef NORM_LAYER
    [[unroll]] for (uint t = 0; t < TOKENS; ++t) measure(first_token, t);
#endif
#if defined(EPILOGUE_ROPE) || defined(EPILOGUE_GATED)
    const uint tiles = (ROWS + TILE - 1) / TILE * 2;
#else
    const uint tiles = (ROWS + TILE - 1) / TILE;
#endif
    [[dont_unroll]] for (uint group = 0; group < GROUPS; ++group) {
        uint first_tile = (gl_WorkGroupID.x * GROUPS + group) * ROW_TILES;
        if (first_tile >= tiles) break;
        float sums[ROW_TILES][TOKENS];
        [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) {
            [[unroll]] for (uint t = 0; t < TOKENS; ++t) sums[r][t] = 0.0;
        }
        accumulate(first_tile, lane, first_token, sums);
#ifdef NORM_RMS
        [[unroll]] for (uint r = 0; r < ROW_TILES; ++r) {
            [[unroll]] for (uint t = 0; t < TOKENS; ++t) sums[r][t] *= scale[t];
        }
#endif
#ifdef LANES_SHARED
        if (LANE < TILE)
#endif
        store_block(first_tile, lane, first_token, sums);
    }
}
