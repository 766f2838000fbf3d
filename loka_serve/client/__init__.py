"""A typed client of the server: `Client` and, for asyncio, `AsyncClient`. Needs the extra `client`; loads no torch.

from loka_serve.client import Client

with Client("http://localhost:8000", api_key=...) as client:
    for item in client.recommend(history=["item-1", "item-2"], num_items=10).items:
        print(item.rank, item.item_id, item.score)
"""

from loka_serve.client.answers import CatalogInfo, Item, Model, Recommendation, Usage
from loka_serve.client.asynchronous import AsyncClient
from loka_serve.client.errors import (
    ClientError,
    DeadlineExceeded,
    FieldError,
    InvalidRequest,
    NoAnswer,
    NotAllowed,
    Overloaded,
    RequestFailed,
    Unavailable,
)
from loka_serve.client.requests import RequestFields
from loka_serve.client.retries import Retries
from loka_serve.client.synchronous import Client

__all__ = [
    "AsyncClient",
    "CatalogInfo",
    "Client",
    "ClientError",
    "DeadlineExceeded",
    "FieldError",
    "InvalidRequest",
    "Item",
    "Model",
    "NoAnswer",
    "NotAllowed",
    "Overloaded",
    "Recommendation",
    "RequestFailed",
    "RequestFields",
    "Retries",
    "Unavailable",
    "Usage",
]
