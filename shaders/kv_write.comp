#version 450
//! variants KV=f32,f16 OFFSET=push,buffer
// Writes one projection's rows of this step into its KV cache at the KV offset: cache[head][offset + token] = x[token][head].
//
// OFFSET_PUSH takes the offset and the number of tokens from push constants (the SymEnv path); OFFSET_BUFFER reads them from
// device memory (the device-offset path), so that a held recording writes elsewhere for each token.
#extension GL_GOOGLE_include_directive : require
#include "kv_cache.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint KV_HEADS = 1;
layout(constant_id = 2) const uint HEAD_DIM = 4;
layout(constant_id = 3) const uint MAX_SEQ = 1;
layout(constant_id = 4) const uint X_OFFSET = 0;  // in vec4
layout(constant_id = 5) const uint X_STRIDE = 1;  // in vec4

layout(std430, binding = 0) readonly buffer X { vec4 x[]; };
layout(std430, binding = 1) writeonly buffer Cache { KV_WORD cache[]; };
layout(push_constant) uniform Push {
    uint cache_first;  // where the layer begins in its buffer, in units of 16 bytes
#ifdef OFFSET_PUSH
    uint cached_len;
    uint token_count;
#endif
};
#ifdef OFFSET_BUFFER
layout(std430, binding = 2) readonly buffer Offset { uint offset[]; };  // cached_len, attended_len
layout(std430, binding = 3) readonly buffer TokenCount { uint token_counts[]; };
#endif

void main() {
#ifdef OFFSET_BUFFER
    uint cached_len = offset[0];
    uint token_count = token_counts[0];
#endif
    const uint row_words = HEAD_DIM / 4;
    uint word = gl_GlobalInvocationID.x;
    uint token = gl_WorkGroupID.y;
    if (word >= KV_HEADS * row_words || token >= token_count || cached_len + token >= MAX_SEQ) return;
    uint head = word / row_words;
    vec4 value = x[token * X_STRIDE + X_OFFSET + word];
    cache[KV_UNIT_WORDS * cache_first + (head * MAX_SEQ + cached_len + token) * row_words + word % row_words] = KV_STORE(value);
}
