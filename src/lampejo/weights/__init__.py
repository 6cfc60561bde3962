"""Where weights come from: aliases, the cache folder, downloads, and strict readers of safetensors and GGUF.

``store`` finds or fetches files, ``checkpoint`` opens a target model, ``drafters`` opens a drafter for it.
"""
