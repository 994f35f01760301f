import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for toy_decoder.py and toy_equality.py
