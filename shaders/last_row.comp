#version 450
// y = x[token_count - 1]: the row of the last real token, so that a prompt's head runs once.
layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint COLUMNS = 64;

layout(std430, binding = 0) readonly buffer X { float x[]; };
layout(std430, binding = 1) readonly buffer TokenCount { uint token_count[]; };
layout(std430, binding = 2) writeonly buffer Y { float y[]; };

// Where the parts begin that are bound, in units of 16 bytes.
layout(push_constant) uniform Push {
    uint x_first;
    uint token_count_first;
    uint y_first;
};

void main() {
    uint column = gl_GlobalInvocationID.x;
    uint row = max(token_count[4 * token_count_first], 1) - 1;
    if (column < COLUMNS) y[4 * y_first + column] = x[4 * x_first + row * COLUMNS + column];
}
