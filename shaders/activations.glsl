// Activation functions, written so that no intermediate overflows to NaN.
#ifndef ACTIVATIONS_GLSL
#define ACTIVATIONS_GLSL

// x / (1 + exp(-x)); Elfwing et al. 2017.
float silu(float x) {
    return x / (1.0 + exp(-x));
}

// 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), as x / (1 + exp(-2 u)); Hendrycks and Gimpel 2016.
float gelu_tanh(float x) {
    return x / (1.0 + exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)));
}

// x Phi(x), Phi the normal distribution; Hendrycks and Gimpel 2016. The tail 0.5 erfc(z), z = |x| / sqrt(2), is 0.5 t exp(P(t) - z^2)
// with t = 1 / (1 + z / 2), whose P is smooth: a Chebyshev fit of degree 9 for z from 0 to 11, within 7e-8.
float gelu(float x) {
    float z = abs(x) * 0.7071067811865476;
    float t = 1.0 / (1.0 + 0.5 * z);
    float p = 0.14929638803005219;
    p = fma(p, t, -0.7050741314888);
    p = fma(p, t, 1.215011477470398);
    p = fma(p, t, -0.7756091952323914);
    p = fma(p, t, -0.013009585440158844);
    p = fma(p, t, -0.03542753681540489);
    p = fma(p, t, 0.047438111156225204);
    p = fma(p, t, 0.3838745951652527);
    p = fma(p, t, 0.9989647269248962);
    p = fma(p, t, -1.2654649019241333);
    float tail = 0.5 * t * exp(p - z * z);
    return x * (x < 0.0 ? tail : 1.0 - tail);
}

// cap tanh(x / cap); Bello et al. 2016. tanh(u) as 1 - 2 / (exp(2 u) + 1), which no large u turns to NaN.
float softcap(float x, float cap) {
    return cap - 2.0 * cap / (exp(2.0 * x / cap) + 1.0);
}

// The activation of a specialization constant, as runtime/kernel_choice.py numbers them: 1 SiLU, 2 the tanh form of GELU, 3 what
// gpt-oss puts its gates through.
float activation(float x, uint kind) {
    if (kind == 0) return x;
    float z = kind == 1 ? x : kind == 3 ? 1.702 * x : 1.5957691216057308 * (x + 0.044715 * x * x * x);
    return x / (1.0 + exp(-z));
}

// What a gate and its up value give: the activation of the first times the second. In gpt-oss both are clamped, as its released
// models have it, and one is added to the second.
float gated(float gate, float up, uint kind) {
    if (kind == 3) {
        gate = min(gate, 7.0);
        up = clamp(up, -7.0, 7.0) + 1.0;
    }
    return activation(gate, kind) * up;
}

#endif
