#version 450
// Rotary position embedding of one projection: y[token][head] = x[token][head] turned by the token's angles.
// Pairs are (i, i + ROTARY_DIM / 2), as in Hugging Face checkpoints; dimensions from ROTARY_DIM on pass unchanged.
// Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint HEADS = 1;
layout(constant_id = 2) const uint HEAD_DIM = 2;
layout(constant_id = 3) const uint ROTARY_DIM = 2;
layout(constant_id = 4) const uint X_OFFSET = 0;
layout(constant_id = 5) const uint X_STRIDE = 2;

layout(std430, binding = 0) readonly buffer X { float x[]; };
layout(std430, binding = 1) readonly buffer RopeCos { float rope_cos[]; };
layout(std430, binding = 2) readonly buffer RopeSin { float rope_sin[]; };
layout(std430, binding = 3) writeonly buffer Y { float y[]; };

// Where the parts begin that are bound, in units of 16 bytes.
layout(push_constant) uniform Push {
    uint x_first;
    uint rope_cos_first;
    uint rope_sin_first;
    uint y_first;
};

void main() {
    uint column = gl_GlobalInvocationID.x;
    uint token = gl_WorkGroupID.y;
    if (column >= HEADS * HEAD_DIM) return;
    uint d = column % HEAD_DIM;
    uint start = 4 * x_first + token * X_STRIDE + X_OFFSET;
    float value = x[start + column];
    if (d < ROTARY_DIM) {
        const uint half_dim = ROTARY_DIM / 2;
        bool first = d < half_dim;
        uint other = first ? column + half_dim : column - half_dim;
        float partner = x[start + other];
        uint angle = token * (HEAD_DIM / 2) + (first ? d : d - half_dim);
        float turned = (first ? -partner : partner) * rope_sin[4 * rope_sin_first + angle];
        value = value * rope_cos[4 * rope_cos_first + angle] + turned;
    }
    y[4 * y_first + token * HEADS * HEAD_DIM + column] = value;
}
