#version 450
//! variants DTYPE=f32,f16,bf16
// y[token] = row token_ids[token] of the embedding, which may be the output head's own storage (tied weights).
#extension GL_GOOGLE_include_directive : require
#include "weights.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint TILE = 32;
layout(constant_id = 2) const uint COLUMNS = 64;

layout(std430, binding = 0) readonly buffer Weight { uvec4 weight[]; };
layout(std430, binding = 1) readonly buffer TokenIds { uint token_ids[]; };
layout(std430, binding = 2) writeonly buffer Y { float y[]; };

void main() {
    const uint chunks = (COLUMNS + PACK - 1) / PACK;
    uint chunk = gl_GlobalInvocationID.x;
    uint token = gl_WorkGroupID.y;
    if (chunk >= chunks) return;
    uint row = token_ids[token];
    uvec4 packed = weight[(row / TILE * chunks + chunk) * TILE + row % TILE];
    for (uint pair = 0; pair < PACK / 2; ++pair) {
        vec2 value = unpack_pair(packed, pair);
        uint column = chunk * PACK + 2 * pair;
        if (column < COLUMNS) y[token * COLUMNS + column] = value.x;
        if (column + 1 < COLUMNS) y[token * COLUMNS + column + 1] = value.y;
    }
}
