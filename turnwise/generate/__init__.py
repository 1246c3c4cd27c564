"""Everything that samples tokens: the interface (base), engines in this process (hf, with slots/
and blocks/), endpoints (openai) and scripts. Knows neither environments nor episodes.
"""
