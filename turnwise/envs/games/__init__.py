"""The environments that come with turnwise. Each stands alone: none imports another."""
