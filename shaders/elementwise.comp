#version 450
//! variants OP=add,mul,silu,gelu,gelu_tanh,scale,softcap,clamped_swiglu
// y = a + b, y = a * b, an activation of a, a times a constant, a softly capped by one, or gpt-oss's gate a of b, value by value.
#extension GL_GOOGLE_include_directive : require
#include "activations.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint COUNT = 1;
#if defined(OP_SCALE) || defined(OP_SOFTCAP)
layout(constant_id = 2) const uint FACTOR_BITS = 0;  // float bits of the constant
#endif

layout(std430, binding = 0) readonly buffer A { float a[]; };
layout(std430, binding = 1) writeonly buffer Y { float y[]; };
#if defined(OP_ADD) || defined(OP_MUL) || defined(OP_CLAMPED_SWIGLU)
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
#ifdef OP_CLAMPED_SWIGLU
    y[i] = gated(a[i], b[i], 3);
#endif
#ifdef OP_GELU_TANH
    y[i] = gelu_tanh(a[i]);
#endif
#ifdef OP_GELU
    y[i] = gelu(a[i]);
#endif
#ifdef OP_SCALE
    y[i] = a[i] * uintBitsToFloat(FACTOR_BITS);
#endif
#ifdef OP_SOFTCAP
    y[i] = softcap(a[i], uintBitsToFloat(FACTOR_BITS));
#endif
#ifdef OP_SILU
    y[i] = silu(a[i]);
#endif
}
