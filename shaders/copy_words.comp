#version 450
// target[target_start + i] = source[source_start + i] for i < count: how storage without transfer usage is filled and read.
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;

layout(std430, binding = 0) readonly buffer Source { uint source[]; };
layout(std430, binding = 1) writeonly buffer Target { uint target[]; };

layout(push_constant) uniform Push {
    uint source_start;
    uint target_start;
    uint count;
};

// A workgroup of a CPU driver costs more than a word, so each has many, whatever their number.
void main() {
    const uint all = gl_NumWorkGroups.x * WORKGROUP;
    [[dont_unroll]] for (uint i = gl_GlobalInvocationID.x; i < count; i += all) {
        target[target_start + i] = source[source_start + i];
    }
}
