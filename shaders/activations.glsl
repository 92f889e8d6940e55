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

#endif
