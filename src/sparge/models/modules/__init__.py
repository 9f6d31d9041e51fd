"""Any torch module: its calls of `F.scaled_dot_product_attention`, inside its own forward."""
