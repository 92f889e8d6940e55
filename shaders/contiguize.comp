#version 450
// y[token] = COLUMNS values of x[token] from X_OFFSET on: a view's columns, copied together.
layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint COLUMNS = 1;
layout(constant_id = 2) const uint X_OFFSET = 0;
layout(constant_id = 3) const uint X_STRIDE = 1;

layout(std430, binding = 0) readonly buffer X { float x[]; };
layout(std430, binding = 1) writeonly buffer Y { float y[]; };

void main() {
    uint column = gl_GlobalInvocationID.x;
    uint token = gl_WorkGroupID.y;
    if (column < COLUMNS) y[token * COLUMNS + column] = x[token * X_STRIDE + X_OFFSET + column];
}
