"""Whatever samples tokens: the contract (base), engines in this process (hf, with slots/ and blocks/), endpoints
(openai) and scripts. Nothing here knows what an environment or an episode is.
"""
