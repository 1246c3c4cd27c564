"""WebShop: search and buy in a shop, with WebShop's pages, goals and reward, without its
servers."""

from turnwise.envs.games.webshop.catalog import Product, ProductError, read_products
from turnwise.envs.games.webshop.env import WebShopEnv
from turnwise.envs.games.webshop.goals import Goal
from turnwise.envs.games.webshop.reward import Score, judge
from turnwise.envs.games.webshop.shop import Shop, load_shop

__all__ = [
    "Goal",
    "Product",
    "ProductError",
    "Score",
    "Shop",
    "WebShopEnv",
    "judge",
    "load_shop",
    "read_products",
]
