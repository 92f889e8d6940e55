#version 450
// best[group] = key and column of the highest value of each group of a row; of equal ones the first column.
// Each workgroup takes WORKGROUP * LENGTH columns next to one another, and each lane every WORKGROUP-th of them as its group.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "sort_key.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint COLUMNS = 1;
layout(constant_id = 2) const uint LENGTH = 1;

layout(std430, binding = 0) readonly buffer X { uint x[]; };
layout(std430, binding = 1) writeonly buffer Best { uvec2 best[]; };

// Where the parts begin that are bound, in units of 16 bytes.
layout(push_constant) uniform Push {
    uint x_first;
    uint best_first;
};

void main() {
    const uint first = gl_WorkGroupID.x * WORKGROUP * LENGTH + gl_LocalInvocationID.x;
    const uint end = min(first + WORKGROUP * LENGTH, COLUMNS);
    uint highest = 0u;  // below every key
    uint at = first;
    [[dont_unroll]] for (uint column = first; column < end; column += WORKGROUP) {
        uint key = sort_key(x[4 * x_first + column]);
        bool higher = key > highest;
        highest = higher ? key : highest;
        at = higher ? column : at;
    }
    best[2 * best_first + gl_GlobalInvocationID.x] = uvec2(highest, at);
}
