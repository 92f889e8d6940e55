#version 450
//! variants LANES=subgroup,shared NORM=rms,layer
// One token, or one group of its features such as a head, per workgroup, normalized: y = x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019), or
// y = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias (Ba et al. 2016).
#extension GL_GOOGLE_include_directive : require
#include "lanes.glsl"

layout(constant_id = 1) const uint COLUMNS = 64;
layout(constant_id = 2) const uint EPSILON_BITS = 0;
layout(constant_id = 3) const uint X_OFFSET = 0;    // where a token's first group is in x, and from token to token
layout(constant_id = 4) const uint X_STRIDE = 64;
layout(constant_id = 5) const uint ONE_WEIGHT = 0;  // the weight is that of one group, the same for all
#ifdef NORM_LAYER
layout(constant_id = 6) const uint HAS_NORM_BIAS = 0;
#endif

layout(std430, binding = 0) readonly buffer X { float x[]; };
layout(std430, binding = 1) readonly buffer Weight { float weight[]; };
layout(std430, binding = 2) writeonly buffer Y { float y[]; };
#ifdef NORM_LAYER
layout(std430, binding = 3) readonly buffer Bias { float bias[]; };
#endif

void main() {
    const uint group = gl_WorkGroupID.y * COLUMNS;
    const uint start = gl_WorkGroupID.x * X_STRIDE + X_OFFSET + group;
    const uint target = gl_WorkGroupID.x * gl_NumWorkGroups.y * COLUMNS + group;
    const uint weights = ONE_WEIGHT != 0 ? 0 : group;
    float mean = 0.0;
#ifdef NORM_LAYER
    float sum = 0.0;
    [[dont_unroll]] for (uint column = LANE; column < COLUMNS; column += WORKGROUP) sum += x[start + column];
    mean = lane_sum(sum) / float(COLUMNS);
#endif
    float squares = 0.0;
    [[dont_unroll]] for (uint column = LANE; column < COLUMNS; column += WORKGROUP) {
        float distance = x[start + column] - mean;
        squares = fma(distance, distance, squares);
    }
    float scale = inversesqrt(lane_sum(squares) / float(COLUMNS) + uintBitsToFloat(EPSILON_BITS));
    [[dont_unroll]] for (uint column = LANE; column < COLUMNS; column += WORKGROUP) {
        float value = (x[start + column] - mean) * scale * weight[weights + column];
#ifdef NORM_LAYER
        if (HAS_NORM_BIAS != 0) value += bias[weights + column];
#endif
        y[target + column] = value;
    }
}
