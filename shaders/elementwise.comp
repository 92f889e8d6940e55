#version 450
//! variants OP=add,mul,silu,gelu,gelu_tanh,scale,softcap,clamped_swiglu
// Value by value: y = a + b, y = a * b, an activation of a, a times a constant, a softly capped by one, or gpt-oss's gate a of b.
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
#define TWO_OPERANDS
layout(std430, binding = 2) readonly buffer B { float b[]; };
#endif

// Where the parts begin that are bound, in units of 16 bytes.
layout(push_constant) uniform Push {
    uint a_first;
    uint y_first;
#ifdef TWO_OPERANDS
    uint b_first;
#endif
};

void main() {
    uint i = gl_GlobalInvocationID.y * gl_NumWorkGroups.x * WORKGROUP + gl_GlobalInvocationID.x;
    if (i >= COUNT) return;
    float value = a[4 * a_first + i];
#ifdef TWO_OPERANDS
    float other = b[4 * b_first + i];
#endif
#ifdef OP_ADD
    value += other;
#endif
#ifdef OP_MUL
    value *= other;
#endif
#ifdef OP_CLAMPED_SWIGLU
    value = gated(value, other, 3);
#endif
#ifdef OP_GELU_TANH
    value = gelu_tanh(value);
#endif
#ifdef OP_GELU
    value = gelu(value);
#endif
#ifdef OP_SCALE
    value *= uintBitsToFloat(FACTOR_BITS);
#endif
#ifdef OP_SOFTCAP
    value = softcap(value, uintBitsToFloat(FACTOR_BITS));
#endif
#ifdef OP_SILU
    value = silu(value);
#endif
    y[4 * y_first + i] = value;
}
