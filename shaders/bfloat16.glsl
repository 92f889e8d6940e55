// bfloat16, the upper half of a float32.
#ifndef BFLOAT16_GLSL
#define BFLOAT16_GLSL

vec2 unpack_bf16(uint word) {
    return vec2(uintBitsToFloat(word << 16), uintBitsToFloat(word & 0xffff0000u));
}

#endif
