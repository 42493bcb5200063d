"""pdlab: does prefill/decode disaggregation pay, with which P:D ratio, TP degrees and placement?"""

__version__ = "0.1.0"
