#version 450
//! variants OP=add,mul,silu,gelu_tanh
// y = a + b, y = a * b, or an activation of a, value by value.
#extension GL_GOOGLE_include_directive : require
#include "activations.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint COUNT = 1;

layout(std430, binding = 0) readonly buffer A { float a[]; };
layout(std430, binding = 1) writeonly buffer Y { float y[]; };
#if defined(OP_ADD) || defined(OP_MUL)
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
#ifdef OP_GELU_TANH
    y[i] = gelu_tanh(a[i]);
#endif
#ifdef OP_SILU
    y[i] = silu(a[i]);
#endif
}
