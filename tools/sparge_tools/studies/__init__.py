"""Programs for developers: `python -m sparge_tools.studies.NAME`.

targets           compare documents of `sparge bench --json` and `sparge eval --json` with targets
gpu_check         the conformance suite and the benchmark on a GPU, as one document to share
tune_search       compare sparge's search with the paper's, on a real model
synthetic_errors  density and errors of several recipes on structured inputs, with block maps
scale_model       bytes and seconds of one layer over many devices, by a model
"""
