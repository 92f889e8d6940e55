#version 450
//! variants OP=add,mul,silu
// y = a + b, y = a * b, or y = silu(a), value by value.
layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint COUNT = 1;

layout(std430, binding = 0) readonly buffer A { float a[]; };
layout(std430, binding = 1) writeonly buffer Y { float y[]; };
#ifndef OP_SILU
layout(std430, binding = 2) readonly buffer B { float b[]; };
#endif

void main() {
    uint i = gl_GlobalInvocationID.y * gl_NumWorkGroups.x * WORKGROUP + gl_GlobalInvocationID.x;
    if (i >= COUNT) return;
#ifdef OP_ADD
    y[i] = a[i] + b[i];
#endif
#ifdef OP_MUL
    y[i] = a[i] * b[i];
#endif
#ifdef OP_SILU
    y[i] = a[i] / (1.0 + exp(-a[i]));
#endif
}
