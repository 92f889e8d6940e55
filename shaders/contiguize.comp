#version 450
// y[token] = COLUMNS values of x[token] from X_OFFSET on: a view's columns, copied together.
layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint COLUMNS = 1;
layout(constant_id = 2) const uint X_OFFSET = 0;
layout(constant_id = 3) const uint X_STRIDE = 1;

layout(std430, binding = 0) readonly buffer X { float x[]; };
layout(std430, binding = 1) writeonly buffer Y { float y[]; };

// Where the parts begin that are bound, in units of 16 bytes.
layout(push_constant) uniform Push {
    uint x_first;
    uint y_first;
};

void main() {
    uint column = gl_GlobalInvocationID.x;
    uint token = gl_WorkGroupID.y;
    if (column >= COLUMNS) return;
    y[4 * y_first + token * COLUMNS + column] = x[4 * x_first + token * X_STRIDE + X_OFFSET + column];
}
