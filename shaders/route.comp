#version 450
// Which experts a token takes and how much of each, from one logit for each expert: a row of route is USED experts, best first, and
// then the bits of their weights. A token finds the rank of each expert by comparing it with all others, so ranks differ whatever
// the logits are, NaN included. Rows behind the step's tokens name no expert.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "sort_key.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint EXPERTS = 4;
layout(constant_id = 2) const uint USED = 1;
layout(constant_id = 3) const uint NORMALIZED = 0;  // a softmax over the chosen experts, not over all

layout(std430, binding = 0) readonly buffer X { uint x[]; };
layout(std430, binding = 1) readonly buffer TokenCount { uint token_count[]; };
layout(std430, binding = 2) writeonly buffer Route { uint route[]; };

// Where the parts begin that are bound, in units of 16 bytes.
layout(push_constant) uniform Push {
    uint x_first;
    uint token_count_first;
    uint route_first;
};

shared uint logits[EXPERTS];
shared uint ranks[EXPERTS];

uint rank_of(uint expert) {
    uint key = sort_key(logits[expert]);
    uint rank = 0;
    [[dont_unroll]] for (uint other = 0; other < EXPERTS; ++other) {
        uint other_key = sort_key(logits[other]);
        rank += uint(other_key > key || (other_key == key && other < expert));
    }
    return rank;
}

void main() {
    const uint lane = gl_LocalInvocationID.x;
    const uint token = gl_WorkGroupID.x;
    const uint start = 4 * route_first + token * 2 * USED;
    if (token >= token_count[4 * token_count_first]) {
        [[dont_unroll]] for (uint slot = lane; slot < USED; slot += WORKGROUP) route[start + slot] = 0xFFFFFFFFu;
        return;
    }
    [[dont_unroll]] for (uint expert = lane; expert < EXPERTS; expert += WORKGROUP) {
        logits[expert] = x[4 * x_first + token * EXPERTS + expert];
    }
    barrier();
    float highest = uintBitsToFloat(logits[0]);
    [[dont_unroll]] for (uint expert = lane; expert < EXPERTS; expert += WORKGROUP) ranks[expert] = rank_of(expert);
    [[dont_unroll]] for (uint expert = 1; expert < EXPERTS; ++expert) {
        highest = max(highest, uintBitsToFloat(logits[expert]));
    }
    barrier();
    float sum = 0.0;
    [[dont_unroll]] for (uint expert = 0; expert < EXPERTS; ++expert) {
        if (NORMALIZED == 0 || ranks[expert] < USED) sum += exp(uintBitsToFloat(logits[expert]) - highest);
    }
    [[dont_unroll]] for (uint expert = lane; expert < EXPERTS; expert += WORKGROUP) {
        uint rank = ranks[expert];
        if (rank >= USED) continue;
        route[start + rank] = expert;
        route[start + USED + rank] = floatBitsToUint(exp(uintBitsToFloat(logits[expert]) - highest) / sum);
    }
}
