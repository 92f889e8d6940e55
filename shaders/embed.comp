#version 450
//! variants DTYPE=f32,f16,bf16,q4_0,q4_1,q5_0,q5_1,q8_0,q2_k,q3_k,q4_k,q5_k,q6_k,iq4_nl PART=0,1
// y[token] = row token_ids[token] of the embedding, which may be the output head's own storage (tied weights).
// With PART the storage holds ROW_COUNT rows from FIRST_ROW on, and tokens of other rows keep what another
// part gave, or 0 where there is none yet.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint TILE = 32;
layout(constant_id = 2) const uint COLUMNS = 64;
#if PART
layout(constant_id = 3) const uint FIRST_ROW = 0;
layout(constant_id = 4) const uint ROW_COUNT = 1;
layout(constant_id = 5) const uint HAS_OTHERS = 0;
#endif

layout(std430, binding = 0) readonly buffer Weight { uint weight[]; };
layout(std430, binding = 1) readonly buffer TokenIds { uint token_ids[]; };
layout(std430, binding = 2) writeonly buffer Y { float y[]; };
#if PART
layout(std430, binding = 3) readonly buffer Others { float others[]; };
#endif

// Where the parts begin that are bound, in units of 16 bytes.
layout(push_constant) uniform Push {
    uint weight_first;
    uint token_ids_first;
    uint y_first;
#if PART
    uint others_first;
#endif
};

uint row_tile;

// Of a block's rows only this one is wanted.
uvec4 load_words(uint at) {
    return uvec4(weight[4 * (weight_first + at) + row_tile], 0, 0, 0);
}

#include "weights.glsl"

void main() {
    const uint chunks = (COLUMNS + PACK - 1) / PACK;
    uint chunk = gl_GlobalInvocationID.x;
    uint token = gl_WorkGroupID.y;
    if (chunk >= chunks) return;
    uint row = token_ids[4 * token_ids_first + token];
    uint start = token * COLUMNS;
#if PART
    if (row < FIRST_ROW || row - FIRST_ROW >= ROW_COUNT) {
        uint end = min((chunk + 1) * PACK, COLUMNS);
        for (uint column = chunk * PACK; column < end; ++column) {
            y[4 * y_first + start + column] = HAS_OTHERS != 0 ? others[4 * others_first + start + column] : 0.0;
        }
        return;
    }
    row -= FIRST_ROW;
#endif
    row_tile = row / TILE % ROW_TILES;
    Chunk held = load_chunk(row / (TILE * ROW_TILES), chunk, row % TILE);
    [[dont_unroll]] for (uint j = 0; j < 4; ++j) {
        [[unroll]] for (uint l = 0; l < PACK / 4; ++l) {
            uint column = chunk * PACK + 4 * l + j;
            if (column < COLUMNS) y[4 * y_first + start + column] = weight_at(held, l, j).x;
        }
    }
}
