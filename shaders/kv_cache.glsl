// One K or V cache of a layer: [kv_heads][cache_rows][HEAD_DIM], four values of one row at a time, or two.
// KV_F32 holds floats, KV_F16 packed pairs of halves. Rows from the cached length on hold anything, NaN included. Behind the
// max_seq rows of the conversation are the landing rows: a recording that cannot know the offset puts the step's rows there.
// A layer begins some units of 16 bytes into its buffer, KV_UNIT_WORDS words each.
#ifndef KV_CACHE_GLSL
#define KV_CACHE_GLSL

#ifdef KV_F32
#define KV_WORD vec4
#define KV_UNIT_WORDS 1
#define KV_LOAD(word) (word)
#define KV_STORE(value) (value)
#define KV_PAIR vec2
#define KV_STORE_PAIR(value) (value)
#else
#define KV_WORD uvec2
#define KV_UNIT_WORDS 2
#define KV_LOAD(word) vec4(unpackHalf2x16((word).x), unpackHalf2x16((word).y))
#define KV_PAIR uint
// Half floats end at 65504: what is larger is held as the largest, never as infinity.
#define KV_STORE_PAIR(value) packHalf2x16(clamp(value, vec2(-65504.0), vec2(65504.0)))
#define KV_STORE(value) uvec2(KV_STORE_PAIR((value).xy), KV_STORE_PAIR((value).zw))
#endif

#endif
