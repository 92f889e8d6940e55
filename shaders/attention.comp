#version 450
//! variants LANES=subgroup,shared KV=f32,f16 QUERIES=1,2,3,4,8,12
//! only LANES=subgroup or QUERIES=1 or QUERIES=2 or QUERIES=3 or QUERIES=4
// Grouped-query attention of this step's tokens over the rows of the cache, which hold the step's own rows too.
//
// y[token][head] = sum_j softmax_j(q . k_j * scale) v_j, with an online softmax over blocks of WORKGROUP rows (Milakov and
// Gimelshein 2018).
//
// The step's rows are those from attended_len - step_tokens on; each token sees those up to its own. Of the rows before them the
// bounded arm reads all. The masked arm (MASKED) reads all max_seq rows and leaves out those whose mask value is negative; the
// step's rows may then be the landing rows behind them.
// With a window a token sees itself and the window - 1 positions before it, and rows that no token of the workgroup sees are not
// visited. The masked arm then takes the mask for the rows' ages: how many positions each lies before the step's first token.
// A workgroup serves QUERY_HEADS heads of one kv head and QUERY_TOKENS tokens; their product is QUERIES.
#extension GL_GOOGLE_include_directive : require
#include "lanes.glsl"
#include "kv_cache.glsl"
#include "activations.glsl"

layout(constant_id = 1) const uint KV_HEADS = 1;
layout(constant_id = 2) const uint GROUP = 1;        // query heads per kv head
layout(constant_id = 3) const uint HEAD_DIM = 4;
layout(constant_id = 4) const uint QUERY_HEADS = 1;
layout(constant_id = 5) const uint SCALE_BITS = 0;   // float bits of the score scale
layout(constant_id = 6) const uint Q_OFFSET = 0;     // where a token's queries are in q, and from token to token, in vec4
layout(constant_id = 7) const uint Q_STRIDE = 1;
layout(constant_id = 8) const uint CAP_BITS = 0;     // float bits of c where scores become c tanh(score / c); 0 for no cap
layout(constant_id = 9) const uint HAS_SINKS = 0;
layout(constant_id = 10) const uint MASKED = 0;
layout(constant_id = 11) const uint OFFSET_ON_DEVICE = 0;  // attended_len is read from device memory, not a push constant

// What a dispatch does not use is bound to some other buffer.
layout(std430, binding = 0) readonly buffer Q { vec4 q[]; };
layout(std430, binding = 1) readonly buffer CacheK { KV_WORD cache_k[]; };
layout(std430, binding = 2) readonly buffer CacheV { KV_WORD cache_v[]; };
layout(std430, binding = 3) writeonly buffer Y { vec4 y[]; };
layout(std430, binding = 4) readonly buffer TokenCount { uint token_count[]; };
layout(std430, binding = 5) readonly buffer Sinks { float sinks[]; };  // for each head the score of a row without a value
layout(std430, binding = 6) readonly buffer Mask { float mask[]; };
layout(std430, binding = 7) readonly buffer Offset { uint offset[]; };  // cached_len, attended_len

// Where the parts begin that are bound, in units of 16 bytes; then what differs between caches and layers that share a pipeline.
layout(push_constant) uniform Push {
    uint q_first;
    uint cache_k_first;
    uint cache_v_first;
    uint y_first;
    uint token_count_first;
    uint sinks_first;
    uint mask_first;
    uint offset_first;
    uint cache_rows;
    uint max_seq;
    uint step_tokens;  // tokens the step has room for
    uint window;       // positions that a token sees, its own included; 0 for all
    uint attended_len;
};

const float HIDDEN = -3.0e38;
const uint QUERY_TOKENS = QUERIES / QUERY_HEADS;
const uint ROW_WORDS = HEAD_DIM / 4;
// Lanes lie along positions for the scores and along the head's dimensions for the values: PARTS groups of lanes take every
// PARTS-th position, each lane owning WORDS words of the row.
const uint PARTS = WORKGROUP > ROW_WORDS ? WORKGROUP / ROW_WORDS : 1;
const uint WORDS = (ROW_WORDS + WORKGROUP - 1) / WORKGROUP;

struct Running {
    float highest[QUERIES];
    float total[QUERIES];          // this lane's share of the sum of exponentials
    vec4 value[QUERIES * WORDS];
};

#ifdef LANES_SUBGROUP
shared vec4 partial[WORKGROUP];
vec4 kept_q[QUERIES][(ROW_WORDS + WORKGROUP - 1) / WORKGROUP];  // a lane's words of the queries; see kept_x in linear.comp
#else
shared vec4 partial[WORKGROUP];
shared vec4 query[QUERIES * ROW_WORDS];
shared float weight[QUERIES * WORKGROUP];
#endif

uint query_head(uint i) {
    return gl_WorkGroupID.x * QUERY_HEADS + i % QUERY_HEADS;
}

uint first_query_token() {
    return spread(gl_WorkGroupID.y, gl_NumWorkGroups.y) * QUERY_TOKENS;
}

uint query_token(uint i) {
    return first_query_token() + i / QUERY_HEADS;
}

uint query_word(uint i) {
    return q_first + query_token(i) * Q_STRIDE + Q_OFFSET + query_head(i) * ROW_WORDS;
}

// The row of the step's first token.
uint own_row() {
    return (OFFSET_ON_DEVICE != 0 ? offset[4 * offset_first + 1] : attended_len) - step_tokens;
}

// The first of the positions that a token sees; both count from the same row.
uint first_visible(uint token_position) {
    return window == 0 || token_position < window ? 0 : token_position + 1 - window;
}

float finished(float score) {
    score *= uintBitsToFloat(SCALE_BITS);
    return CAP_BITS == 0 ? score : softcap(score, uintBitsToFloat(CAP_BITS));
}

vec4 load_k(uint kv_head, uint row, uint word) {
    return KV_LOAD(cache_k[KV_UNIT_WORDS * cache_k_first + (kv_head * cache_rows + row) * ROW_WORDS + word]);
}

vec4 load_v(uint kv_head, uint row, uint word) {
    return KV_LOAD(cache_v[KV_UNIT_WORDS * cache_v_first + (kv_head * cache_rows + row) * ROW_WORDS + word]);
}

void score_block(uint kv_head, uint row, out float score[QUERIES]) {
    [[unroll]] for (uint i = 0; i < QUERIES; ++i) score[i] = 0.0;
#ifdef LANES_SUBGROUP
    [[dont_unroll]] for (uint base = 0; base < ROW_WORDS; base += WORKGROUP) {
        vec4 held[QUERIES];
        [[unroll]] for (uint i = 0; i < QUERIES; ++i) held[i] = kept_q[i][base / WORKGROUP];
        [[unroll]] for (uint j = 0; j < WORKGROUP; ++j) {
            if (ROW_WORDS % WORKGROUP == 0 || base + j < ROW_WORDS) {
                vec4 key = load_k(kv_head, row, base + j);
                [[unroll]] for (uint i = 0; i < QUERIES; ++i) score[i] += dot(key, subgroupShuffle(held[i], j));
            }
        }
    }
#else
    [[dont_unroll]] for (uint word = 0; word < ROW_WORDS; ++word) {
        vec4 key = load_k(kv_head, row, word);
        [[unroll]] for (uint i = 0; i < QUERIES; ++i) score[i] += dot(key, query[i * ROW_WORDS + word]);
    }
#endif
}

// Folds rows first .. first + count (count <= WORKGROUP) into the running softmax. The step's first token has row `own` and
// position `start`; the rows before it have their own numbers as positions.
void fold_block(uint kv_head, uint own, uint start, uint first, uint count, inout Running state) {
    bool inside = LANE < count;
    uint row = first + min(LANE, count - 1);
    float score[QUERIES];
    score_block(kv_head, row, score);
    bool shown = MASKED == 0 || (row < max_seq && mask[4 * mask_first + min(row, max_seq - 1)] >= 0.0);
    uint position = row < own ? row : start + row - own;
    float weights[QUERIES];
    [[unroll]] for (uint i = 0; i < QUERIES; ++i) {
        bool visible = inside && (row < own ? shown : row <= own + query_token(i));
        if (window != 0) visible = visible && position >= first_visible(start + query_token(i));
        float scaled = visible ? finished(score[i]) : HIDDEN;
        float highest = max(state.highest[i], lane_max(scaled));
        float keep = exp(state.highest[i] - highest);
        weights[i] = visible ? exp(scaled - highest) : 0.0;
        state.total[i] = state.total[i] * keep + weights[i];
        state.highest[i] = highest;
        [[unroll]] for (uint w = 0; w < WORDS; ++w) state.value[i * WORDS + w] *= keep;
    }
    const uint part = LANE / ROW_WORDS;
#ifdef LANES_SUBGROUP
    // Rows behind the last one stand for it and weigh nothing: cheaper than to leave them out, which masks all sums.
    [[unroll]] for (uint j = 0; j < WORKGROUP; j += PARTS) {
        uint mine = min(j + part, count - 1);
        bool counted = part < PARTS && j + part < count;
        float shared_weight[QUERIES];
        [[unroll]] for (uint i = 0; i < QUERIES; ++i) {
            shared_weight[i] = PARTS == 1 ? subgroupShuffle(weights[i], j) : subgroupShuffle(weights[i], mine);
        }
        [[unroll]] for (uint w = 0; w < WORDS; ++w) {
            uint word = min(w * WORKGROUP + LANE - (PARTS > 1 ? part * ROW_WORDS : 0), ROW_WORDS - 1);
            vec4 row = load_v(kv_head, first + mine, word);
            [[unroll]] for (uint i = 0; i < QUERIES; ++i) {
                // A row that no query sees may hold NaN: it is left out, not multiplied by zero.
                bool seen = counted && shared_weight[i] > 0.0;
                state.value[i * WORDS + w] += mix(vec4(0.0), shared_weight[i] * row, bvec4(seen));
            }
        }
    }
#else
    barrier();
    [[unroll]] for (uint i = 0; i < QUERIES; ++i) weight[i * WORKGROUP + LANE] = weights[i];
    barrier();
    if (part < PARTS) {
        [[dont_unroll]] for (uint j = part; j < count; j += PARTS) {
            [[unroll]] for (uint w = 0; w < WORDS; ++w) {
                uint word = min(w * WORKGROUP + LANE - (PARTS > 1 ? part * ROW_WORDS : 0), ROW_WORDS - 1);
                vec4 row = load_v(kv_head, first + j, word);
                [[unroll]] for (uint i = 0; i < QUERIES; ++i) {
                    float share = weight[i * WORKGROUP + j];
                    state.value[i * WORDS + w] += mix(vec4(0.0), share * row, bvec4(share > 0.0));
                }
            }
        }
    }
#endif
}

void main() {
    const uint kv_head = gl_WorkGroupID.x * QUERY_HEADS / GROUP;
    const uint first_token = first_query_token();
    const uint tokens = token_count[4 * token_count_first];
    if (first_token >= tokens) return;
#ifdef LANES_SUBGROUP
    [[dont_unroll]] for (uint base = 0; base < ROW_WORDS; base += WORKGROUP) {
        uint mine = min(base + LANE, ROW_WORDS - 1);
        [[unroll]] for (uint i = 0; i < QUERIES; ++i) kept_q[i][base / WORKGROUP] = q[query_word(i) + mine];
    }
#else
    [[unroll]] for (uint i = 0; i < QUERIES; ++i) {
        for (uint word = LANE; word < ROW_WORDS; word += WORKGROUP) query[i * ROW_WORDS + word] = q[query_word(i) + word];
    }
    barrier();
#endif
    const uint own = own_row();
    // Without a window nobody asks for positions.
    const uint start = MASKED != 0 && window != 0 ? uint(max(mask[4 * mask_first], 0.0)) : own;
    uint end = own + min(first_token + QUERY_TOKENS, tokens);
    if (MASKED != 0) end = max(end, max_seq);
    end = min(end, cache_rows);
    Running state;
    [[unroll]] for (uint i = 0; i < QUERIES; ++i) {
        state.highest[i] = HAS_SINKS != 0 ? sinks[4 * sinks_first + query_head(i)] : HIDDEN;
        state.total[i] = HAS_SINKS != 0 && LANE == 0 ? 1.0 : 0.0;
        [[unroll]] for (uint w = 0; w < WORDS; ++w) state.value[i * WORDS + w] = vec4(0.0);
    }
    // Rows that even the workgroup's first token does not see are not visited.
    [[dont_unroll]] for (uint first = first_visible(start + first_token); first < end; first += WORKGROUP) {
        fold_block(kv_head, own, start, first, min(end - first, WORKGROUP), state);
    }

    [[unroll]] for (uint i = 0; i < QUERIES; ++i) {
        float total = lane_sum(state.total[i]);
        uint target = y_first + query_token(i) * KV_HEADS * GROUP * ROW_WORDS + query_head(i) * ROW_WORDS;
        [[unroll]] for (uint w = 0; w < WORDS; ++w) {
            vec4 value = state.value[i * WORDS + w];
            uint word = w * WORKGROUP + LANE;
            if (PARTS > 1) {
                barrier();
                partial[LANE] = value;
                barrier();
                value = vec4(0.0);
                if (LANE < ROW_WORDS) {
                    for (uint part = 0; part < PARTS; ++part) value += partial[part * ROW_WORDS + LANE];
                }
            }
            if (word < ROW_WORDS && query_token(i) < step_tokens) y[target + word] = value / total;
        }
    }
}
