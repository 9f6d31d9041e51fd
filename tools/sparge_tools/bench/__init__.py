"""`sparge bench`: contenders, cases, the rows measured, and the self-check before measuring."""
