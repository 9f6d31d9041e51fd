"""`sparge demo`: one document read by a model with dense attention and with sparge, as a page."""
