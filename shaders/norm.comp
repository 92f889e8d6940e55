#version 450
//! variants LANES=subgroup,shared NORM=rms
// y[token] = x[token] / sqrt(mean(x[token]^2) + epsilon) * weight, one token per workgroup.
// Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
#extension GL_GOOGLE_include_directive : require
#include "lanes.glsl"

layout(constant_id = 1) const uint COLUMNS = 64;
layout(constant_id = 2) const uint EPSILON_BITS = 0;

layout(std430, binding = 0) readonly buffer X { float x[]; };
layout(std430, binding = 1) readonly buffer Weight { float weight[]; };
layout(std430, binding = 2) writeonly buffer Y { float y[]; };

void main() {
    const uint start = gl_WorkGroupID.x * COLUMNS;
    float sum = 0.0;
    [[dont_unroll]] for (uint column = LANE; column < COLUMNS; column += WORKGROUP) {
        float value = x[start + column];
        sum = fma(value, value, sum);
    }
    float scale = inversesqrt(lane_sum(sum) / float(COLUMNS) + uintBitsToFloat(EPSILON_BITS));
    [[dont_unroll]] for (uint column = LANE; column < COLUMNS; column += WORKGROUP) {
        y[start + column] = x[start + column] * scale * weight[column];
    }
}
