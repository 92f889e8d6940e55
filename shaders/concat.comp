#version 450
// y[token] = a[token] followed by b[token]: joins what the parts of a split weight gave.
layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint A_COLUMNS = 1;
layout(constant_id = 2) const uint B_COLUMNS = 1;

layout(std430, binding = 0) readonly buffer A { float a[]; };
layout(std430, binding = 1) readonly buffer B { float b[]; };
layout(std430, binding = 2) writeonly buffer Y { float y[]; };

// Where the parts begin that are bound, in units of 16 bytes.
layout(push_constant) uniform Push {
    uint a_first;
    uint b_first;
    uint y_first;
};

void main() {
    uint column = gl_GlobalInvocationID.x;
    uint token = gl_WorkGroupID.y;
    const uint columns = A_COLUMNS + B_COLUMNS;
    if (column >= columns) return;
    uint target = 4 * y_first + token * columns + column;
    if (column < A_COLUMNS) {
        y[target] = a[4 * a_first + token * A_COLUMNS + column];
    } else {
        y[target] = b[4 * b_first + token * B_COLUMNS + column - A_COLUMNS];
    }
}
