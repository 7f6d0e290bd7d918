"""SAEs used on a model: read which latents fire on a text, change them, and see what the model then predicts."""
