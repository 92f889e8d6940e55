#version 450
// y[token] = a[token] followed by b[token]: joins what the parts of a split weight gave.
layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint A_COLUMNS = 1;
layout(constant_id = 2) const uint B_COLUMNS = 1;

layout(std430, binding = 0) readonly buffer A { float a[]; };
layout(std430, binding = 1) readonly buffer B { float b[]; };
layout(std430, binding = 2) writeonly buffer Y { float y[]; };

void main() {
    uint column = gl_GlobalInvocationID.x;
    uint token = gl_WorkGroupID.y;
    const uint columns = A_COLUMNS + B_COLUMNS;
    if (column >= columns) return;
    y[token * columns + column] =
        column < A_COLUMNS ? a[token * A_COLUMNS + column] : b[token * B_COLUMNS + column - A_COLUMNS];
}
