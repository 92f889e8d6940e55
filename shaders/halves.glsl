// 16-bit numbers in the lower halves of words.
#ifndef HALVES_GLSL
#define HALVES_GLSL

vec4 unpack_f16(uvec4 words) {
    return vec4(
        unpackHalf2x16(words.x).x, unpackHalf2x16(words.y).x, unpackHalf2x16(words.z).x, unpackHalf2x16(words.w).x
    );
}

// bfloat16 is the upper half of a float32.
vec4 unpack_bf16(uvec4 words) {
    return uintBitsToFloat(words << 16);
}

#endif
