// Unsigned integers in the order of the float32 values that they stand for, from the bits alone, so that no driver's rules for
// denormals or NaN count. -0 is equal to 0; NaN is above all else, so that it is found.
#ifndef SORT_KEY_GLSL
#define SORT_KEY_GLSL

uint sort_key(uint bits) {
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0xFFFFFFFFu;
    if (bits == 0x80000000u) bits = 0u;
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

#endif
