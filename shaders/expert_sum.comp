#version 450
// y[token] = the outputs of the token's USED experts by their weights, plus what a shared expert gives by the sigmoid of its
// gate, plus a residual. What a dispatch does not use is bound to some other buffer.
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint COLUMNS = 1;
layout(constant_id = 2) const uint USED = 1;
layout(constant_id = 3) const uint HAS_SHARED = 0;
layout(constant_id = 4) const uint HAS_RESIDUAL = 0;

layout(std430, binding = 0) readonly buffer X { float x[]; };
layout(std430, binding = 1) readonly buffer Route { uint route[]; };  // see route.comp
layout(std430, binding = 2) readonly buffer Shared { float from_shared[]; };
layout(std430, binding = 3) readonly buffer SharedGate { float shared_gate[]; };
layout(std430, binding = 4) readonly buffer Residual { float residual[]; };
layout(std430, binding = 5) writeonly buffer Y { float y[]; };

// Where the parts begin that are bound, in units of 16 bytes.
layout(push_constant) uniform Push {
    uint x_first;
    uint route_first;
    uint from_shared_first;
    uint shared_gate_first;
    uint residual_first;
    uint y_first;
};

void main() {
    const uint column = gl_GlobalInvocationID.x;
    const uint token = gl_WorkGroupID.y;
    if (column >= COLUMNS) return;
    float sum = 0.0;
    [[dont_unroll]] for (uint slot = 0; slot < USED; ++slot) {
        float weight = uintBitsToFloat(route[4 * route_first + (2 * token + 1) * USED + slot]);
        sum = fma(weight, x[4 * x_first + (token * USED + slot) * COLUMNS + column], sum);
    }
    uint at = token * COLUMNS + column;
    if (HAS_SHARED != 0) {
        float gate = shared_gate[4 * shared_gate_first + token];
        sum += from_shared[4 * from_shared_first + at] / (1.0 + exp(-gate));
    }
    if (HAS_RESIDUAL != 0) sum += residual[4 * residual_first + at];
    y[4 * y_first + at] = sum;
}
