#version 450
//! variants LANES=subgroup,shared NORM=rms,layer
// One token, or one group of its features such as a head, per workgroup, normalized:
// y = x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019), or
// y = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias (Ba et al. 2016).
// The heads in it may then be turned, as in rope.comp, and a residual added.
#extension GL_GOOGLE_include_directive : require
#include "lanes.glsl"

layout(constant_id = 1) const uint COLUMNS = 64;
layout(constant_id = 2) const uint EPSILON_BITS = 0;
layout(constant_id = 3) const uint X_OFFSET = 0;      // where a token's first group is in x, and from token to token
layout(constant_id = 4) const uint X_STRIDE = 64;
// The groups that share the first weight; those behind them share the second. With 0 each has its own.
layout(constant_id = 5) const uint FIRST_GROUPS = 0;
layout(constant_id = 6) const uint HAS_RESIDUAL = 0;
layout(constant_id = 7) const uint HEAD_DIM = 2;      // rotation only, like the one below, which is 0 where there is none
layout(constant_id = 8) const uint ROTARY_DIM = 0;
#ifdef NORM_LAYER
layout(constant_id = 9) const uint HAS_NORM_BIAS = 0;
#endif

// What a dispatch does not use is bound to some other buffer.
layout(std430, binding = 0) readonly buffer X { float x[]; };
layout(std430, binding = 1) readonly buffer Weight { float weight[]; };
layout(std430, binding = 2) writeonly buffer Y { float y[]; };
layout(std430, binding = 3) readonly buffer Residual { float residual[]; };
layout(std430, binding = 4) readonly buffer RopeCos { float rope_cos[]; };
layout(std430, binding = 5) readonly buffer RopeSin { float rope_sin[]; };
#ifdef NORM_LAYER
layout(std430, binding = 6) readonly buffer Bias { float bias[]; };
#endif

// Where the parts begin that are bound, in units of 16 bytes.
layout(push_constant) uniform Push {
    uint x_first;
    uint weight_first;
    uint y_first;
    uint residual_first;
    uint rope_cos_first;
    uint rope_sin_first;
#ifdef NORM_LAYER
    uint bias_first;
#endif
};

float normalized(uint start, uint weights, uint column, float mean, float scale) {
    float value = (x[start + column] - mean) * scale * weight[4 * weight_first + weights + column];
#ifdef NORM_LAYER
    if (HAS_NORM_BIAS != 0) value += bias[4 * bias_first + weights + column];
#endif
    return value;
}

void main() {
    const uint group = gl_WorkGroupID.y;
    const uint start = 4 * x_first + gl_WorkGroupID.x * X_STRIDE + X_OFFSET + group * COLUMNS;
    const uint target = (gl_WorkGroupID.x * gl_NumWorkGroups.y + group) * COLUMNS;
    const uint weights = (FIRST_GROUPS == 0 ? group : group < FIRST_GROUPS ? 0 : 1) * COLUMNS;
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
        float value = normalized(start, weights, column, mean, scale);
        uint d = column % HEAD_DIM;
        if (d < ROTARY_DIM) {
            const uint half_dim = ROTARY_DIM / 2;
            bool first = d < half_dim;
            uint other = first ? column + half_dim : column - half_dim;
            float partner = normalized(start, weights, other, mean, scale);
            uint angle = gl_WorkGroupID.x * (HEAD_DIM / 2) + (first ? d : d - half_dim);
            float turned = (first ? -partner : partner) * rope_sin[4 * rope_sin_first + angle];
            value = value * rope_cos[4 * rope_cos_first + angle] + turned;
        }
        if (HAS_RESIDUAL != 0) value += residual[4 * residual_first + target + column];
        y[4 * y_first + target + column] = value;
    }
}
