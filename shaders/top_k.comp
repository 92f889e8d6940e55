#version 450
//! variants LANES=subgroup,shared
// y = the K highest values of a row, best first, as pairs of column and bits; of equal ones the lowest columns. One workgroup.
//
// `best` holds key and column of the highest value of each group, as `group_max` leaves them with workgroups of BLOCK. The K groups
// with the highest maxima hold the K highest values: any other value has those K maxima before it. So a bisection over the maxima
// gives a threshold, the values in K groups that reach it are listed, and each one's rank is how many go before it. There are rarely
// many more than K of them; where they exceed the list, a second bisection, over the values themselves, gives the threshold that
// exactly K reach. At least K groups must hold a value, and LISTED be at least K and WORKGROUP.
#extension GL_GOOGLE_include_directive : require
#include "lanes.glsl"
#include "sort_key.glsl"

layout(constant_id = 1) const uint COLUMNS = 1;
layout(constant_id = 2) const uint GROUPS = 1;
layout(constant_id = 3) const uint K = 1;
layout(constant_id = 4) const uint LISTED = 32;
layout(constant_id = 5) const uint BLOCK = 1;
layout(constant_id = 6) const uint LENGTH = 1;

layout(std430, binding = 0) readonly buffer X { uint x[]; };
layout(std430, binding = 1) readonly buffer Best { uvec2 best[]; };
layout(std430, binding = 2) writeonly buffer Y { uvec2 y[]; };

// Where the parts begin that are bound, in units of 16 bytes.
layout(push_constant) uniform Push {
    uint x_first;
    uint best_first;
    uint y_first;
};

shared uvec2 listed[LISTED];  // key and column
shared uint chosen[K];        // groups
shared uint total;

// Whether a value goes before or is itself the other one.
bool reaches(uvec2 value, uvec2 threshold) {
    return value.x > threshold.x || (value.x == threshold.x && value.y <= threshold.y);
}

uint bits_at(uint column) {
    return x[4 * x_first + column];
}

uvec2 best_of(uint group) {
    return best[2 * best_first + group];
}

// Value number i of the chosen groups; the key 0 stands for one behind the row's end.
uvec2 chosen_value(uint i) {
    uint group = chosen[i % K];
    uint column = (group / BLOCK * LENGTH + i / K) * BLOCK + group % BLOCK;
    return column < COLUMNS ? uvec2(sort_key(bits_at(column)), column) : uvec2(0u);
}

#define COUNT(result, values, value_of, condition)                                       \
    {                                                                                    \
        uint counted = 0u;                                                               \
        [[dont_unroll]] for (uint i = LANE; i < values; i += WORKGROUP) {                \
            uvec2 value = value_of;                                                      \
            counted += condition ? 1u : 0u;                                              \
        }                                                                                \
        result = uint(lane_sum(float(counted)));                                         \
    }

// The value that exactly K of the others reach, itself among them: its key bit by bit, then its column.
#define BISECT(threshold, values, value_of)                                              \
    {                                                                                    \
        threshold = uvec2(0u, 0xFFFFFFFFu);                                              \
        uint reached = 0u;                                                               \
        [[dont_unroll]] for (uint bit = 0x80000000u; bit != 0u && reached != K; bit >>= 1) { \
            uint tried;                                                                  \
            COUNT(tried, values, value_of, value.x >= (threshold.x | bit))               \
            if (tried >= K) {                                                            \
                threshold.x |= bit;                                                      \
                reached = tried;                                                         \
            }                                                                            \
        }                                                                                \
        if (reached != K) {                                                              \
            uint above;                                                                  \
            COUNT(above, values, value_of, value.x > threshold.x)                        \
            threshold.y = 0u;                                                            \
            [[dont_unroll]] for (uint bit = 1u << findMSB(COLUMNS); bit != 0u; bit >>= 1) { \
                uint before;                                                             \
                COUNT(before, values, value_of, value.x == threshold.x && value.y < (threshold.y | bit)) \
                if (above + before < K) threshold.y |= bit;                              \
            }                                                                            \
        }                                                                                \
    }

// List the chosen groups' values that reach the threshold; `total` counts also those for which there is no room.
void list_values(uvec2 threshold) {
    barrier();
    if (LANE == 0) total = 0u;
    barrier();
    [[dont_unroll]] for (uint i = LANE; i < K * LENGTH; i += WORKGROUP) {
        uvec2 value = chosen_value(i);
        if (value.x != 0u && reaches(value, threshold)) {
            uint at = atomicAdd(total, 1u);
            if (at < LISTED) listed[at] = value;
        }
    }
    barrier();
}

void list_best() {
    uvec2 threshold;
    BISECT(threshold, GROUPS, best_of(i))
    if (LANE == 0) total = 0u;
    barrier();
    [[dont_unroll]] for (uint i = LANE; i < GROUPS; i += WORKGROUP) {
        if (reaches(best_of(i), threshold)) chosen[atomicAdd(total, 1u)] = i;
    }
    barrier();
    list_values(threshold);
    if (total > LISTED) {
        BISECT(threshold, K * LENGTH, chosen_value(i))
        list_values(threshold);
    }
}

// For K = 1: the best of each lane.
void list_one_of_each_lane() {
    uvec2 highest = uvec2(0u);
    [[dont_unroll]] for (uint i = LANE; i < GROUPS; i += WORKGROUP) {
        uvec2 value = best_of(i);
        if (highest.x == 0u || reaches(value, highest)) highest = value;
    }
    listed[LANE] = highest;
    if (LANE == 0) total = min(WORKGROUP, GROUPS);
    barrier();
}

void main() {
    if (K == 1) {
        list_one_of_each_lane();
    } else {
        list_best();
    }
    [[dont_unroll]] for (uint i = LANE; i < total; i += WORKGROUP) {
        uvec2 value = listed[i];
        uint rank = 0u;
        [[dont_unroll]] for (uint other = 0; other < total && rank < K; ++other) {
            rank += other != i && reaches(listed[other], value) ? 1u : 0u;
        }
        if (rank < K) y[2 * y_first + rank] = uvec2(value.y, bits_at(value.y));
    }
}
