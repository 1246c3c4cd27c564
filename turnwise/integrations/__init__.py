"""turnwise inside other projects, and their environments inside turnwise. The core imports nothing
from here."""
