// A weight as the kernels read it: rows in tiles of TILE, 16 bytes of one row's consecutive columns next to the same 16 bytes of
// the tile's other rows. PACK is the number of columns in 16 bytes; both counts are padded with zeros.
//
// The uvec4 of row (tile * TILE + lane), columns chunk * PACK .. + PACK, stands at (tile * chunks + chunk) * TILE + lane.
#ifndef WEIGHTS_GLSL
#define WEIGHTS_GLSL

#ifdef DTYPE_F32
#define PACK 4
#else
#define PACK 8
#endif

// Columns 2 * pair and 2 * pair + 1 of the chunk.
vec2 unpack_pair(uvec4 chunk, uint pair) {
#ifdef DTYPE_F32
    return vec2(uintBitsToFloat(chunk[2 * pair]), uintBitsToFloat(chunk[2 * pair + 1]));
#endif
#ifdef DTYPE_F16
    return unpackHalf2x16(chunk[pair]);
#endif
#ifdef DTYPE_BF16
    return vec2(uintBitsToFloat(chunk[pair] << 16), uintBitsToFloat(chunk[pair] & 0xffff0000u));
#endif
}

#endif
