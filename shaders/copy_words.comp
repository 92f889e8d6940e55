#version 450
// target[target_start + i] = source[source_start + i] for i < count: how storage without transfer usage is filled and read.
layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;

layout(std430, binding = 0) readonly buffer Source { uint source[]; };
layout(std430, binding = 1) writeonly buffer Target { uint target[]; };

layout(push_constant) uniform Push {
    uint source_start;
    uint target_start;
    uint count;
};

void main() {
    uint i = gl_GlobalInvocationID.y * gl_NumWorkGroups.x * WORKGROUP + gl_GlobalInvocationID.x;
    if (i < count) target[target_start + i] = source[source_start + i];
}
