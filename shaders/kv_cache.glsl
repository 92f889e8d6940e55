// One K or V cache of a layer: [kv_heads][MAX_SEQ][HEAD_DIM], four values of one row at a time.
// KV_F32 holds a vec4; KV_F16 holds two packed half pairs. Rows from the cached length on hold anything, NaN included.
// A layer begins some units of 16 bytes into its buffer, KV_UNIT_WORDS words each.
#ifndef KV_CACHE_GLSL
#define KV_CACHE_GLSL

#ifdef KV_F32
#define KV_WORD vec4
#define KV_UNIT_WORDS 1
#define KV_LOAD(word) (word)
#define KV_STORE(value) (value)
#else
#define KV_WORD uvec2
#define KV_UNIT_WORDS 2
#define KV_LOAD(word) vec4(unpackHalf2x16((word).x), unpackHalf2x16((word).y))
// Half floats end at 65504: what is larger is held as the largest, never as infinity.
#define KV_STORE(value) uvec2(                                           \
    packHalf2x16(clamp((value).xy, vec2(-65504.0), vec2(65504.0))),      \
    packHalf2x16(clamp((value).zw, vec2(-65504.0), vec2(65504.0))))
#endif

#endif
