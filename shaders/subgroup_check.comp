#version 450
// Start-up check of what LANES_SUBGROUP relies on: a workgroup of gl_SubgroupSize invocations is one full subgroup, and its sum,
// maximum and shuffle give what they should. result[lane] is 1 where all of that holds.
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;

layout(std430, binding = 0) writeonly buffer Result { uint result[]; };

void main() {
    uint lane = gl_SubgroupInvocationID;
    float value = float(lane + 1);
    bool good = gl_NumSubgroups == 1 && gl_SubgroupSize == WORKGROUP && lane < WORKGROUP;
    good = good && subgroupAdd(value) == float(WORKGROUP * (WORKGROUP + 1) / 2);
    good = good && subgroupMax(value) == float(WORKGROUP);
    good = good && subgroupShuffle(value, WORKGROUP - 1) == float(WORKGROUP);
    good = good && subgroupShuffle(value, WORKGROUP - 1 - lane) == float(WORKGROUP - lane);
    result[gl_LocalInvocationID.x] = good ? 1 : 0;
}
