"""The networks around S3 codes, 25 a second, which several families share: tokenizer, speaker encoder, flow
and vocoder (CosyVoice 2, arXiv 2412.10117)."""
