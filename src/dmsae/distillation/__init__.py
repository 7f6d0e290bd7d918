"""The paper's algorithms: distillation (Algorithm 1) and transfer (Algorithm 3)."""
