"""The environments that come with turnwise. They are independent: none imports another."""
