// The invocations of one workgroup ("lanes") and the reductions over them.
//
// LANES_SUBGROUP: the workgroup is exactly one subgroup; reductions are subgroup operations. Only chosen where the start-up
// self-check has shown that a workgroup of gl_SubgroupSize invocations is one full subgroup.
// LANES_SHARED: nothing is assumed about subgroups; reductions go through shared memory. WORKGROUP must be a power of two.
#ifndef LANES_GLSL
#define LANES_GLSL

#ifdef LANES_SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;

// A workgroup's place among as many: bits reversed, for a power of two. CPU drivers give each thread a row of neighbours; so the
// threads share what the first or the last have more to do.
uint spread(uint group, uint groups) {
    if ((groups & (groups - 1)) != 0) return group;
    return bitfieldReverse(group) >> 1 >> (31 - findMSB(groups));
}

#ifdef LANES_SUBGROUP

#define LANE gl_SubgroupInvocationID

// A CPU driver runs subgroup reductions lane by lane; a shuffle with a constant index is one instruction there.
const uint FEW_LANES = 16;

float lane_sum(float value) {
    if (WORKGROUP > FEW_LANES) return subgroupAdd(value);
    float sum = subgroupShuffle(value, 0);
    [[unroll]] for (uint lane = 1; lane < min(WORKGROUP, FEW_LANES); ++lane) sum += subgroupShuffle(value, lane);
    return sum;
}

float lane_max(float value) {
    if (WORKGROUP > FEW_LANES) return subgroupMax(value);
    float most = subgroupShuffle(value, 0);
    [[unroll]] for (uint lane = 1; lane < min(WORKGROUP, FEW_LANES); ++lane) most = max(most, subgroupShuffle(value, lane));
    return most;
}

#else

#define LANE gl_LocalInvocationID.x

shared float lane_scratch[WORKGROUP];

#define LANE_REDUCE(value, combine)                                                      \
    barrier();                                                                           \
    lane_scratch[LANE] = value;                                                          \
    barrier();                                                                           \
    [[dont_unroll]] for (uint half_width = WORKGROUP / 2; half_width > 0; half_width /= 2) { \
        if (LANE < half_width) {                                                         \
            lane_scratch[LANE] = combine(lane_scratch[LANE], lane_scratch[LANE + half_width]); \
        }                                                                                \
        barrier();                                                                       \
    }                                                                                    \
    return lane_scratch[0];

float add_values(float a, float b) {
    return a + b;
}

float lane_sum(float value) {
    LANE_REDUCE(value, add_values)
}

float lane_max(float value) {
    LANE_REDUCE(value, max)
}

#endif
#endif
