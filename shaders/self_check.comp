#version 450
// Start-up check of what every kernel relies on: shared memory with barriers, and float32 and 16-bit numbers.
//
// The host holds the results against what they must be. All operands come from a buffer, so that no compiler works them out.
// Each lane leaves its sum, its maximum and what it got from its neighbours; lane 0 leaves the numbers behind those.
#extension GL_GOOGLE_include_directive : require
#define LANES_SHARED
#define KV_F16
#include "lanes.glsl"
#include "halves.glsl"
#include "kv_cache.glsl"
#include "activations.glsl"

layout(constant_id = 1) const uint ROUNDS = 1;   // how often values are handed on
layout(constant_id = 2) const uint HALVES = 1;   // words of two float16
layout(constant_id = 3) const uint BFLOATS = 4;  // words of two bfloat16
layout(constant_id = 4) const uint PACKED = 4;   // float32 to be stored as float16, a multiple of 4
layout(constant_id = 5) const uint SELECTS = 1;  // pairs of a value and its mask; a negative mask hides
layout(constant_id = 6) const uint EXPS = 1;
layout(constant_id = 7) const uint SILUS = 1;
layout(constant_id = 8) const uint ROOTS = 1;

layout(std430, binding = 0) readonly buffer Operands { uint operands[]; };
layout(std430, binding = 1) writeonly buffer Result { uint result[]; };

const float HIDDEN = -3.0e38;

float operand(uint at) {
    return uintBitsToFloat(operands[at]);
}

void check_numbers(uint target) {
    uint at = WORKGROUP;
    [[dont_unroll]] for (uint i = 0; i < HALVES; ++i) {
        vec2 value = unpackHalf2x16(operands[at++]);
        result[target++] = floatBitsToUint(value.x);
        result[target++] = floatBitsToUint(value.y);
    }
    [[dont_unroll]] for (uint i = 0; i < BFLOATS; ++i) {
        uint word = operands[at++];
        vec4 value = unpack_bf16(uvec4(word, word >> 16, 0, 0));
        result[target++] = floatBitsToUint(value.x);
        result[target++] = floatBitsToUint(value.y);
    }
    [[dont_unroll]] for (uint i = 0; i < PACKED; i += 4) {
        uvec2 stored = KV_STORE(vec4(operand(at), operand(at + 1), operand(at + 2), operand(at + 3)));
        at += 4;
        result[target++] = stored.x;
        result[target++] = stored.y;
    }
    [[dont_unroll]] for (uint i = 0; i < SELECTS; ++i) {
        float value = operand(at);
        bool hidden = operand(at + 1) < 0.0;
        at += 2;
        float highest = max(HIDDEN, hidden ? HIDDEN : value);
        float sum = 0.0;
        if (!hidden) sum += value;
        result[target++] = floatBitsToUint(highest);
        result[target++] = floatBitsToUint(sum);
    }
    [[dont_unroll]] for (uint i = 0; i < EXPS; ++i) result[target++] = floatBitsToUint(exp(operand(at++)));
    [[dont_unroll]] for (uint i = 0; i < SILUS; ++i) result[target++] = floatBitsToUint(silu(operand(at++)));
    [[dont_unroll]] for (uint i = 0; i < ROOTS; ++i) result[target++] = floatBitsToUint(inversesqrt(operand(at++)));
}

void main() {
    uint lane = LANE;
    float value = operand(lane);
    float sum = lane_sum(value);
    float highest = lane_max(value);
    float held = value;
    [[dont_unroll]] for (uint i = 0; i < ROUNDS; ++i) {
        barrier();
        lane_scratch[lane] = held;
        barrier();
        held = lane_scratch[(lane + 1) % WORKGROUP] + 1.0;
    }
    result[3 * lane] = floatBitsToUint(sum);
    result[3 * lane + 1] = floatBitsToUint(highest);
    result[3 * lane + 2] = floatBitsToUint(held);
    if (lane == 0) check_numbers(3 * WORKGROUP);
}
